"""Is the chosen plan the best one? It and others, in turns, on the same devices.

    python tools/plan_choice.py make FOLDER --model yolov2-front --batch 1 --profile profile.json
    terrazzo run --on 6xpi3 tools/plan_choice.py run FOLDER
    python tools/plan_choice.py show FOLDER

``make`` writes the planner's choice, its next best, every uniform layout with the groups ``each``
and ``one``, and random plans, as far as they are predicted to fit into memory. ``run`` trains by
each of them in the same processes (``net.change_plan``), and by the choice again after every few
others, so that it is held against its neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import terrazzo as tz
from terrazzo.bench.cases import Case
from terrazzo.bench.task import Task, WithLoss, optimizer_of
from terrazzo.graph.export import export
from terrazzo.planner.borders import ends
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import group_title, plan_graph
from terrazzo.planner.layouts import candidates
from terrazzo.planner.prices import speeds
from terrazzo.planner.search import search
from terrazzo.records import Graph, Group, Plan
from terrazzo.records.profile import Profile
from terrazzo.runtime.part import Part
from terrazzo.schedule import lower

BEST, RANDOM = 10, 10
CHOICE = "choice"
AGAIN_EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["make", "run", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="yolov2-front")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--memory-mib", type=int, default=600, help="beyond the idle process")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"make": make, "run": run, "show": show}[args.verb](args)


# ---- making --------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> None:
    profile = Profile.load(args.profile)
    case = Case.of(args.model, on=str(len(profile.devices)), batch=args.batch)
    task = Task.make(case)
    graph = export(WithLoss(task.model), (task.images,)).graph
    args.folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, dict[str, Any]] = {}
    for name, plan in plans(graph, profile, args.seed):
        found = predict(lower(graph, plan), profile)
        most = max(found.memory_bytes) >> 20
        left = most > args.memory_mib
        print(f"{name}: {found.step_s:.3f} s, {most} MiB predicted{', left out' if left else ''}")
        if not left:
            plan.save(args.folder / f"{name}.json")
            kept[name] = {"predicted_s": found.step_s, "predicted_mib": most}
    index = {"model": args.model, "batch": args.batch, "plans": kept}
    (args.folder / "index.json").write_text(json.dumps(index, indent=1))


def plans(graph: Graph, profile: Profile, seed: int) -> Iterator[tuple[str, Plan]]:
    """The choice first."""
    devices, speed = len(profile.devices), speeds(profile)
    found = search(graph, profile)
    yield CHOICE, found.best.plan
    for place, tried in enumerate(found.rejected[:BEST]):
        yield f"next-{place + 1}", tried.plan
    layouts = candidates(graph, speed)
    for layout in layouts:
        mixed = len(set(layout.letters) - {"w"}) > 1
        if not (layout.is_whole or mixed or any(0 in cut for _, cut in layout.cuts)):
            for groups in ("each", "one"):
                name = f"{layout}-{groups}".replace(":", "-")
                yield name, plan_graph(graph, devices, layout=layout, groups=groups)
    draw = random.Random(seed)
    for number in range(RANDOM):
        yield f"random-{number + 1}", _random(graph, devices, layouts, draw)


def _random(graph: Graph, devices: int, layouts: Any, draw: random.Random) -> Plan:
    places = ends(graph)
    chosen = sorted(draw.sample(places[:-1], draw.randint(2, min(8, len(places) - 1))))
    groups, begin = [], 0
    for end in [*chosen, places[-1]]:
        title = group_title(graph, begin, end)
        groups.append(Group(graph.nodes[end].output, draw.choice(layouts), title))
        begin = end + 1
    return Plan(graph.digest, devices, tuple(groups))


# ---- running -------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    device = tz.init()
    index = json.loads((args.folder / "index.json").read_text())
    names = _in_turns(list(index["plans"]))
    case = Case.of(index["model"], on="", batch=index["batch"])
    task = Task.make(case)
    net = tz.parallelize(WithLoss(task.model), (task.images,), _load(args.folder, names[0]))
    optimizer = optimizer_of(net.parameters())
    times: dict[str, list[float]] = {}
    for name in names:
        net.change_plan(_load(args.folder, name), optimizer)
        (boxes,) = net.boxes([tuple(task.images.shape)])
        box = boxes[net.links.device]
        fed = Part(task.images[box.slices()].clone(), box, tuple(task.images.shape))
        took = [_step(net, fed, optimizer) for _ in range(1 + args.steps)][1:]
        times.setdefault(name, []).extend(took)
        if device == 0:
            print(f"{name}: {', '.join(f'{t:.2f}' for t in took)} s", flush=True)
            (args.folder / "times.json").write_text(json.dumps(times, indent=1))


def _in_turns(names: list[str]) -> list[str]:
    others = [name for name in names if name != CHOICE]
    order = [CHOICE]
    for place in range(0, len(others), AGAIN_EVERY):
        order += [*others[place : place + AGAIN_EVERY], CHOICE]
    return order


def _load(folder: Path, name: str) -> Plan:
    return Plan.load(folder / f"{name}.json")


def _step(net: Any, fed: Part, optimizer: torch.optim.Optimizer) -> float:
    """Seconds until the last device is done."""
    begin_s = time.perf_counter()
    torch.autograd.backward(net(fed))
    optimizer.step()
    optimizer.zero_grad()
    took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    return float(net.links.gather(took, counted=False).max())


# ---- showing -------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> None:
    known = json.loads((args.folder / "index.json").read_text())["plans"]
    times = json.loads((args.folder / "times.json").read_text())
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, median in sorted(medians.items(), key=lambda pair: pair[1]):
        predicted = known[name]["predicted_s"]
        print(f"{name:28} {median:7.3f} s  predicted {predicted:7.3f} s  {predicted / median:5.2f}")
    best = min(medians, key=medians.__getitem__)
    print(f"the choice takes {medians[CHOICE] / medians[best]:.3f} times as long as {best}")


if __name__ == "__main__":
    main()

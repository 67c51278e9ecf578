"""Is the chosen plan the best one? It and others, in turns, on the same devices.

    python tools/plan_choice.py compare FOLDER --model resnet18 --batch 6 --on 6xpi3 --minutes 7
    python tools/plan_choice.py show FOLDER

As root for emulated devices. They are measured, then there are plans: the planner's first, its
ten next best, every uniform layout with the groups ``each`` and ``one``, and ten random ones, as
far as they are predicted to fit into memory. Training begins as a script's does, with
``net.keep_pace``: what is settled on in its first steps is the choice (``--first``: the planner's
first plan is). Then all are trained by in the same processes (``net.change_plan``), the ones that
promise most first; the choice again after every few others, so that each is held against the choice
just before and after it. A plan that is far behind is left
after one step. When a part of the time is over, those close to the best have more turns, so that
the best is not the one that was lucky once. FOLDER gets the profile, the plans, ``times.json``
while it runs and ``result.json``, which also names plans that were not reached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from random_plan import random_plan

import terrazzo as tz
from terrazzo.bench.cases import HALF_SIDES, Case
from terrazzo.bench.fed import fed
from terrazzo.bench.task import Task, WithLoss, optimizer_of
from terrazzo.cli.place import Place, add_lab_flags
from terrazzo.cluster import Hosts, launch
from terrazzo.errors import TerrazzoError
from terrazzo.graph.export import export
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.measuring import measure
from terrazzo.planner import Wishes
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import plan_graph
from terrazzo.planner.layouts import candidates
from terrazzo.planner.limits import within
from terrazzo.planner.prices import speeds
from terrazzo.planner.wishes import rooms_bytes
from terrazzo.records import Graph, Plan
from terrazzo.records.profile import Profile
from terrazzo.runtime.part import Part
from terrazzo.schedule import lower

BEST, RANDOM, DRAWS = 10, 10, 40
FIRST = "first"
CHANGING, STEPPING = "@changing", "@stepping"
"""Lines of device 0 for the one who holds its limits. The first step of a turn is not measured, so
it does not matter that limits come back a moment late."""
AGAIN_EVERY, CLOSE_AGAIN_EVERY = 5, 2
FIRST_SHARE = 0.6
"""Of the time of training: for plans that had no turn yet."""
MEASURE_S, MEASURE_SHARE = 20.0, 0.06
BEHIND, FIRST_BEHIND = 1.3, 2.0
"""Times the choice's step: a plan that takes longer gets no second step; the first step of a plan
makes what later ones find."""
CLOSE = 1.15
"""Times the best: plans that have another turn."""
CLOSEST = 8
"""Plans that do, at most, the choice among them or not: it has turns between all others."""
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["compare", "train", "show"], help="train is for devices")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="yolov2-front")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int)
    parser.add_argument("--on", default="6xpi3")
    parser.add_argument("--profile", type=Path, help="of these devices; default: they are measured")
    parser.add_argument("--minutes", type=float, default=8.0, help="all in all")
    parser.add_argument("--first", action="store_true", help="without trying others at first")
    parser.add_argument("--steps", type=int, default=2, help="of a plan in each of its turns")
    parser.add_argument("--seed", type=int, default=0)
    add_lab_flags(parser)
    args = parser.parse_args()
    {"compare": compare, "train": train, "show": show}[args.verb](args)


def compare(args: argparse.Namespace) -> None:
    end_s = time.time() + 60 * args.minutes
    args.folder.mkdir(parents=True)
    with Place.read(args).open() as hosts:
        make(args, hosts)
        command = [sys.executable, __file__, "train", str(args.folder.resolve())]
        command += ["--minutes", f"{(end_s - time.time()) / 60}", "--steps", str(args.steps)]
        command += ["--first"] if args.first else []
        pace = Pace(hosts)
        result = launch(command, hosts, output=pace.line)
        pace.full_speed.close()
    if result.failure is not None:
        print(f"ended early: {result.failure}", file=sys.stderr)
    show(args)


class Pace:
    """Devices start and change plans at full speed, and make their steps at their own."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.full_speed = hosts, ExitStack()
        self.line(0, CHANGING)

    def line(self, device: int, text: str) -> None:
        if text == STEPPING:
            self.full_speed.close()
        elif text != CHANGING:
            print(text if device == 0 else f"device {device}: {text}", flush=True)
        elif isinstance(self.hosts, LabHosts):
            self.full_speed.enter_context(self.hosts.full_speed(links=True))


# ---- making --------------------------------------------------------------------------------------


def make(args: argparse.Namespace, hosts: Hosts) -> None:
    side = args.size or HALF_SIDES.get((args.model, args.batch))
    case = Case.of(args.model, on=args.on, batch=args.batch, side=side)
    task = Task.make(case)
    graph = export(WithLoss(task.model), (task.images,)).graph
    budget_s = min(MEASURE_S, MEASURE_SHARE * 60 * args.minutes)
    profile = (
        Profile.load(args.profile)
        if args.profile
        else measure(hosts, graph, key={}, budget_s=budget_s, tell=lambda text: None)
    )
    profile.save(args.folder / "profile.json")
    rooms, kept, seen = rooms_bytes(profile), {}, set()
    for name, plan in plans(graph, profile, args.seed):
        if plan.groups in seen or sum(one.startswith("random") for one in kept) == RANDOM:
            continue
        seen.add(plan.groups)
        found = predict(lower(graph, plan), profile)
        fits = within(found.memory_bytes, rooms)
        most = max(found.memory_bytes) >> 20
        says = f"{name}: {found.step_s:.3f} s, {most} MiB predicted"
        print(says + ("" if fits else ", left out: it does not fit"), flush=True)
        if fits:
            plan.save(args.folder / f"{name}.json")
            kept[name] = {"predicted_s": found.step_s, "predicted_mib": most}
    index = {"case": case.to_dict(), "plans": kept}
    (args.folder / "index.json").write_text(json.dumps(index, indent=1))


def plans(graph: Graph, profile: Profile, seed: int) -> Iterator[tuple[str, Plan]]:
    """The choice first; more random ones than are wanted, since not all fit."""
    devices, speed = len(profile.devices), speeds(profile)
    wishes = Wishes(profile=profile)
    found = wishes.search(graph, devices)
    yield FIRST, found.best.plan
    for place, tried in enumerate(wishes.rivals(graph, found)):
        yield f"rival-{place + 1}", tried.plan
    for place, tried in enumerate(found.rejected[:BEST]):
        yield f"next-{place + 1}", tried.plan
    layouts = candidates(graph, speed)
    for layout in layouts:
        some_idle = any(0 in shares for _, shares in layout.cuts)
        for groups in () if some_idle else ("each", "one"):
            name = f"{layout}-{groups}".replace(":", "-")
            yield name, plan_graph(graph, devices, layout=layout, groups=groups)
    draw = random.Random(seed)
    for number in range(DRAWS):
        plan = random_plan(graph, layouts, draw, devices=devices, borders=(2, 8))
        yield f"random-{number + 1}", plan


# ---- training ------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """On every device: all take the same decisions, by times that all of them know."""
    begin_s = time.monotonic()
    end_s = begin_s + 60 * args.minutes
    first_end_s = begin_s + FIRST_SHARE * 60 * args.minutes
    device = tz.init()
    index = json.loads((args.folder / "index.json").read_text())
    case = Case.from_dict(index["case"])
    task = Task.make(case)
    profile = args.folder / "profile.json"
    net = tz.parallelize(
        WithLoss(task.model), (task.images,), profile=profile, delivery="none", seed=args.seed
    )
    optimizer = optimizer_of(net.parameters())
    choice = _settled(net, task.images, optimizer, args)
    turns: list[dict[str, Any]] = []
    names = sorted(index["plans"], key=lambda name: index["plans"][name]["predicted_s"])
    for number in range(ROUNDS):
        names = _close(turns, choice) if number else names
        every = CLOSE_AGAIN_EVERY if number else AGAIN_EVERY
        for name in _in_turns(names, every, choice) if len(names) > 1 else ():
            if tz.agree(int(time.monotonic() > (end_s if number else first_end_s))):
                break
            net.change_plan(_load(args.folder, name), optimizer)
            _tell(device, STEPPING)
            bar_s = _bar_s(name, turns, choice)
            took = _turn(net, task.images, optimizer, steps=args.steps, bar_s=bar_s)
            turns.append({"plan": name, "steps_s": took})
            _tell(device, CHANGING)
            _tell(device, f"{name}: {', '.join(f'{t:.2f}' for t in took)} s")
            if device == 0:
                (args.folder / "times.json").write_text(json.dumps(turns, indent=1))


def _settled(net: Any, images: torch.Tensor, optimizer: Any, args: argparse.Namespace) -> str:
    """The name of the plan that is left when no others are tried any more."""
    device, steps = net.links.device, 0
    _tell(device, STEPPING)
    while not (args.first or net.is_settled):
        _step(net, fed(net, images), optimizer)
        net.keep_pace(optimizer)
        steps += 1
    _tell(device, CHANGING)
    names = json.loads((args.folder / "index.json").read_text())["plans"]
    choice = next(name for name in names if _load(args.folder, name).groups == net.plan.groups)
    if device == 0:
        body = {"choice": choice, "steps": steps}
        (args.folder / "settled.json").write_text(json.dumps(body))
        print(f"settled on {choice} in {steps} steps", flush=True)
    return choice


def _tell(device: int, text: str) -> None:
    if device == 0:
        print(text, flush=True)


def _turn(
    net: Any, images: torch.Tensor, optimizer: torch.optim.Optimizer, *, steps: int, bar_s: float
) -> list[float]:
    """Seconds of steps after the first, or of the first alone if it is far behind."""
    own = fed(net, images)
    first = _step(net, own, optimizer)
    if first > FIRST_BEHIND * bar_s:
        return [first]
    took: list[float] = []
    while len(took) < steps and not (took and took[0] > BEHIND * bar_s):
        took.append(_step(net, own, optimizer))
    return took


def _bar_s(name: str, turns: list[dict[str, Any]], choice: str) -> float:
    """The last time of the choice; nothing bounds itself."""
    if name == choice:
        return float("inf")
    mine = [statistics.median(t["steps_s"]) for t in turns if t["plan"] == choice]
    return mine[-1]


def _in_turns(names: Sequence[str], every: int, choice: str) -> list[str]:
    """The choice before and after every few others."""
    others = [name for name in names if name != choice]
    order = [choice]
    for place in range(0, len(others), every):
        order += [*others[place : place + every], choice]
    return order


def _close(turns: list[dict[str, Any]], choice: str) -> list[str]:
    """Plans that may still be the best."""
    found = _ratios(turns, choice)
    close = [name for name, ratio in found.items() if ratio <= CLOSE * min(found.values())]
    return sorted(close, key=found.__getitem__)[:CLOSEST]


def _load(folder: Path, name: str) -> Plan:
    return Plan.load(folder / f"{name}.json")


def _step(net: Any, own: Part, optimizer: torch.optim.Optimizer) -> float:
    """Seconds until the last device is done."""
    begin_s = time.perf_counter()
    torch.autograd.backward(net(own))
    optimizer.step()
    optimizer.zero_grad()
    took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    return float(net.links.gather(took, counted=False).max())


# ---- showing -------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> None:
    index = json.loads((args.folder / "index.json").read_text())
    if not (args.folder / "times.json").exists():
        raise SystemExit("no step was made: there was no time left, give more --minutes")
    known, turns = index["plans"], json.loads((args.folder / "times.json").read_text())
    settled = json.loads((args.folder / "settled.json").read_text())
    choice = settled["choice"]
    found = _ratios(turns, choice)
    rows = []
    for name, ratio in sorted(found.items(), key=lambda pair: pair[1]):
        mine = [turn["steps_s"] for turn in turns if turn["plan"] == name]
        steps = [s for turn in mine for s in turn]
        rows.append(
            {
                "plan": name,
                "of_choice": ratio,
                "median_s": statistics.median(steps),
                "steps": len(steps),
                "turns": len(mine),
                "predicted_s": known[name]["predicted_s"],
            }
        )
        print(
            f"{name:28} {ratio:6.3f} of the choice  {rows[-1]['median_s']:7.3f} s, {len(steps)} "
            f"steps, predicted {known[name]['predicted_s']:7.3f} s"
        )
    missing = [name for name in known if name not in found]
    for name in missing:
        print(f"{name:28} not reached, predicted {known[name]['predicted_s']:7.3f} s")
    often = [row for row in rows if row["turns"] > 1]
    best = (often if len(often) > 1 else rows)[0]
    loss = 1 / best["of_choice"]
    result = {
        "case": index["case"],
        **settled,
        "choice_of_best": loss,
        "rows": rows,
        "not_reached": missing,
    }
    (args.folder / "result.json").write_text(json.dumps(result, indent=1))
    than = f"{best['plan']}, the best of {len(rows)}"
    print(f"{choice}, the choice, takes {loss:.3f} times as long as {than}")


def _ratios(turns: list[dict[str, Any]], choice: str) -> dict[str, float]:
    """The time of each plan over that of the choice's turns just before and after."""
    times = [statistics.median(turn["steps_s"]) for turn in turns]
    at = [place for place, turn in enumerate(turns) if turn["plan"] == choice]
    ratios: dict[str, list[float]] = {choice: [1.0]}
    for place, turn in enumerate(turns):
        if turn["plan"] != choice:
            before = times[max(p for p in at if p < place)]
            after = times[min((p for p in at if p > place), default=at[-1])]
            ratios.setdefault(turn["plan"], []).append(2 * times[place] / (before + after))
    return {name: statistics.median(found) for name, found in ratios.items()}


if __name__ == "__main__":
    try:
        main()
    except TerrazzoError as error:
        raise SystemExit(f"terrazzo: {error}") from error

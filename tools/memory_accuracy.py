"""How true predicted memory is: bytes of a step by device, against control groups.

python tools/memory_accuracy.py [--on 6] [--batch 1,6] [--plan FILE ...] [network ...]

For each network and batch a few plans of different kinds are predicted and run on as many devices,
each in a control group of its own (as root; without, resident memory of the processes, which also
counts code that torch loads late). They compute in vectors as wide as a board's; beyond that
computing and links run at full speed: neither changes what a step holds. Measured is the peak of
the steps beyond the process after import and joining, as in races; predicted is what the planner
says.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from terrazzo.bench.cases import HALF_SIDES, STANDARD_MODELS, Case
from terrazzo.bench.seats import Seats
from terrazzo.bench.task import Task, WithLoss
from terrazzo.bench.turn import Job, take_turn
from terrazzo.cluster import Hosts, LocalHosts
from terrazzo.errors import PlanError
from terrazzo.graph.export import export
from terrazzo.lab.hosts import LabHosts, is_root
from terrazzo.lab.preset import LinkSpeed, Preset
from terrazzo.lab.topology import Topology
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.guess import Figures, guessed
from terrazzo.records import Graph, Plan
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprints

MIB = 1 << 20
ROOM_BYTES = 10 << 30
"""Of all devices together: high enough that no limit is met."""
FAST_BITS_PER_S = 10e9
STEPS_S = 4.0
BOARD = Figures("board", 7e9, 900 * MIB, 94e6 / 8)
"""What plans are searched for: the kind does not matter here, only that plans differ."""


@dataclass(frozen=True)
class Gap:
    """One plan: bytes by device."""

    what: str
    predicted: tuple[int, ...]
    measured: tuple[int, ...]

    @property
    def error(self) -> float:
        """Of the device that needs most."""
        return max(self.predicted) / max(self.measured) - 1

    def __str__(self) -> str:
        return (
            f"{self.what:44} {max(self.predicted) / MIB:8.1f} {max(self.measured) / MIB:8.1f} "
            f"{self.error:+7.1%}   by device {_mib(self.predicted)} | {_mib(self.measured)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", nargs="*", default=list(STANDARD_MODELS))
    parser.add_argument("--on", type=int, default=6)
    parser.add_argument("--batch", default="1,6")
    parser.add_argument("--size", type=int)
    parser.add_argument("--plan", type=Path, action="append", default=[])
    parser.add_argument("--kinds", default="", help="only plans with one of these words")
    options = parser.parse_args()
    gaps: list[Gap] = []
    print(f"{'':44} predicted measured  MiB of the device with most", flush=True)
    for name in options.network:
        for batch in map(int, options.batch.split(",")):
            side = options.size or HALF_SIDES.get((name, batch))
            case = Case.of(name, on=str(options.on), batch=batch, side=side)
            for gap in _gaps(case, options.on, options.plan, options.kinds.split(",")):
                gaps.append(gap)
                print(gap, flush=True)
    errors = sorted(abs(gap.error) for gap in gaps)
    if errors:
        within = sum(error <= 0.1 for error in errors) / len(errors)
        print(
            f"{len(errors)} plans: median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}, "
            f"{within:.0%} within 10%"
        )


def _gaps(case: Case, devices: int, files: Sequence[Path], kinds: Sequence[str]) -> Iterator[Gap]:
    task = Task.make(case)
    graph = export(WithLoss(task.model), (task.images,)).graph
    plans: Iterable[tuple[str, Plan]] = ((path.name, Plan.load(path)) for path in files)
    for kind, plan in plans if files else _plans(graph, devices, kinds):
        program = lower(graph, plan)
        predicted = tuple(foot.total_bytes for foot in footprints(program))
        what = f"{case.model} {case.side} x{case.batch}, {kind}"
        measured = _measured(case, plan)
        if isinstance(measured, str):
            print(f"{what:44} {max(predicted) / MIB:8.1f}  {measured}", flush=True)
        else:
            yield Gap(what, predicted, measured)


def _plans(graph: Graph, devices: int, kinds: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """One plan of each of the kinds with one of these words, as far as the network has them."""
    rows = 2 if devices % 2 == 0 else 1
    batch = next(graph.shape(name)[0] for name in graph.inputs if name)
    wanted: dict[str, tuple[str, str, int]] = {
        "tiles each": (f"tiles:{rows}x{devices // rows}", "each", 0),
        "tiles 4 groups": (f"tiles:{devices}x1", "4", 0),
        "channels each": (f"channels:{devices}", "each", 0),
        "tiles passes": (f"tiles:{devices}x1", "6", 8),
    }
    if batch >= devices:
        wanted["samples"] = (f"samples:{devices}", "one", 0)
        wanted["samples passes"] = (f"samples:{devices}", "8", 4)
    for kind, (layout, groups, passes) in wanted.items():
        if any(word in kind for word in kinds):
            number: str | int = int(groups) if groups.isdigit() else groups
            yield kind, plan_graph(graph, devices, layout=layout, groups=number, passes=passes)
    profile = guessed([BOARD] * devices)
    for objective in ("time", "memory"):
        if any(word in f"least {objective}" for word in kinds):
            wishes = Wishes(objective=objective, profile=profile)
            yield f"least {objective}", wishes.plan(graph, devices)


def _measured(case: Case, plan: Plan) -> tuple[int, ...] | str:
    """Bytes beyond the idle process by device, or why it could not be run."""
    with tempfile.TemporaryDirectory() as made, _hosts(plan.devices) as hosts:
        folder = Path(made)
        plan.save(folder / "plan.json")
        job = Job(
            case=case,
            peer=f"plan {folder / 'plan.json'}",
            workers=plan.devices,
            folder=folder / "job",
            seconds=STEPS_S,
            patience_s=1.0,
            limit_s=300.0,
        )
        turn = take_turn(job, Seats(hosts, range(plan.devices)), threads=1)
    if turn.problem:
        return turn.problem
    return tuple(map(int.__sub__, turn.best.peak_bytes, turn.idle_bytes))


@contextmanager
def _hosts(devices: int) -> Iterator[Hosts]:
    """Devices without limits that matter; each counted by the kernel, where it can be."""
    if not is_root():
        yield LocalHosts.parse(str(devices))
        return
    roomy = Preset(
        name="roomy",
        flops_per_s=1e9,
        threads=1,
        memory_bytes=ROOM_BYTES // devices,
        wire=LinkSpeed(FAST_BITS_PER_S),
        wifi=None,
        vector_bits=128,
    )
    with ExitStack() as stack:
        topology = Topology.parse(f"{devices}xroomy", {"roomy": roomy})
        yield stack.enter_context(LabHosts.open(topology))


def _mib(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / MIB:.0f}" for size in sizes)


if __name__ == "__main__":
    try:
        main()
    except PlanError as error:
        raise SystemExit(f"terrazzo: {error}") from error

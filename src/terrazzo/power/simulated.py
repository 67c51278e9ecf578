"""A simulated board as a bench: every reading and every change goes through its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from terrazzo.boards import Board, Rig, Workload
from terrazzo.boards.family import drawn_workload
from terrazzo.meters.estimator import Calibration
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.power.benches import StepBench
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs

SEED = 4
"""Of the workload that a board is given where nobody says which."""


@contextmanager
def rigged(board: Board, workload: Workload | None = None) -> Iterator[tuple[Rig, StepBench]]:
    """A board at work in a folder of its own, and a bench on it."""
    with TemporaryDirectory(prefix="terrazzo-board-") as folder:
        rig = Rig(board, Path(folder), workload=workload or drawn_workload(board, SEED))
        yield rig, bench_of(rig)


def bench_of(rig: Rig) -> StepBench:
    guess = Calibration.guess(rig.root)
    meters = find(rig.root, calibration=guess, clock=rig.clock).used
    return StepBench(
        Panel.find(Sysfs(rig.root, rig.pause)),
        Sampler(meters, clock=rig.clock),
        lambda: (rig.steps, rig.time_s),
        clock=rig.clock,
        pause=rig.pause,
    )

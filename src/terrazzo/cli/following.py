"""A tuned training goes on, and every phase of it in its own mode, where changing pays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean

from terrazzo.cli.tuned import show_schedule
from terrazzo.errors import PowerError
from terrazzo.power.benches import StepBench
from terrazzo.power.follower import Follower, PhaseFile
from terrazzo.power.selector import EDP, Goal
from terrazzo.power.tuner import Tuning
from terrazzo.records.modes import ModeTable
from terrazzo.records.seat import COMPUTE, EVALUATION
from terrazzo.report.screen import Screen

PHASES = "TERRAZZO_PHASES"
"""The variable that lets a training tell its phases; the same name as in seating."""


def follow(
    bench: StepBench,
    tuning: Tuning,
    goal: Goal,
    *,
    folder: Path,
    undo: Callable[[], None],
    save: Path | None,
    screen: Screen,
) -> None:
    """Until the training ends. The table that was saved gets the rows of phases, too."""
    if goal.objective == EDP:  # of phases it does not add up
        return
    seen = PhaseFile(folder)
    start = seen().phase
    phase = COMPUTE if start == EVALUATION else start
    follower = Follower(
        bench.switch,
        bench.sampler,
        seen,
        goal,
        {phase: {row.mode: row for row in tuning.rows}},
        tuning.choice.best.mode,
        measure_s=bench.measure_s,
        say=lambda found: show_schedule(found, screen, has_steps=True),
    )
    try:
        while bench.is_running():
            follower.look()
    except Exception as error:  # whatever it is, hours of training are worth more
        screen.line(f"phases are not followed any more: {error}. Training goes on.", "bold")
        with suppress(PowerError):
            undo()
    known = {name: modes for name, modes in follower.rows.items() if modes}
    if save is not None and len(known) > 1:
        rows = [replace(row, phase=name) for name, modes in known.items() for row in modes.values()]
        visits = {name: follower.visits.get(name, [1.0]) for name in known}
        steps = tuple((name, float(max(round(mean(many)), 1))) for name, many in visits.items())
        ModeTable(rows[0].mode.knobs, tuple(rows), steps=steps).save(save)

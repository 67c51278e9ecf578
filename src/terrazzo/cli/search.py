"""The search for the best mode on a bench: by what its meters can tell, in the time there is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from terrazzo.cli.tabled import knobs_of
from terrazzo.cli.tuned import Outcome
from terrazzo.errors import PowerError, UsageError
from terrazzo.meters.estimator import GUESSED_ERROR
from terrazzo.meters.meter import BOARD, part_words
from terrazzo.meters.sampler import Sampler
from terrazzo.power.benches import MEASURE_S, StepBench
from terrazzo.power.explorer import as_measured
from terrazzo.power.formulas import Knobs
from terrazzo.power.panel import Switch
from terrazzo.power.predictor import Predictor
from terrazzo.power.presets import presets
from terrazzo.power.selector import TIME, Goal
from terrazzo.power.tuner import tune
from terrazzo.records.modes import Measured, Mode, ModeTable
from terrazzo.records.power import joules_text, parse_seconds, watts_text
from terrazzo.records.units import seconds_text
from terrazzo.report.modesview import LEFT, PRESET
from terrazzo.report.screen import Screen

TEN_HOURS_S = 36_000.0
"""What a training is taken to last where nobody says."""
MOST_OF_IT = 0.015
"""Of a training's time: beyond it no other mode is measured. The choice's own measurement follows,
in the mode that training goes on in."""


def search(
    bench: StepBench,
    goal: Goal,
    options: argparse.Namespace,
    screen: Screen,
    *,
    root: Path,
    reference: Predictor | None = None,
) -> Outcome:
    """Measures modes, and chooses one of them."""
    named = _named(bench.switch, root)
    tuning = tune(
        bench,
        goal,
        most=options.modes,
        also=[mode for _, _, mode in named],
        reference=reference,
        say=lambda text: screen.line(text, "dim"),
        later=partial(sooner, bench=bench, options=options),
        go_on=partial(_has_time, bench=bench, goal=goal, options=options),
    )
    chosen = next(row for row in tuning.rows if row.mode == tuning.choice.best.mode)
    more_s, more_j = (max(more, 0.0) for more in bench.spent.more(chosen))
    remarks = [
        f"Measuring {len(tuning.rows)} modes took {seconds_text(bench.spent.seconds)}, in which "
        f"{bench.spent.steps:.0f} steps were trained: {seconds_text(more_s)} and "
        f"{joules_text(more_j)} more than in the chosen mode, or {more_s / TEN_HOURS_S:.2%} of ten "
        "hours."
    ]
    if not bench.sampler.is_measured:
        remarks.append("Power is estimated here, not measured: terrazzo power show says why.")
    elif BOARD not in bench.sampler.covers:
        remarks.append(f"Power is that of the {part_words(bench.sampler.covers)} alone.")
    if tuning.left_alone:
        remarks.append(f"Left alone, because they refuse: {', '.join(tuning.left_alone)}.")
    remarks += [f"Left out: {words}" for words in tuning.refused]
    remarks += [
        f"Not believed, something else slowed the device down: {row.mode.text}, "
        f"{seconds_text(row.step_s)}"
        for row in tuning.disturbed
    ]
    remarks += list(bench.sampler.doubts)
    left = [(kind, label, mode.without(tuning.left_alone)) for kind, label, mode in named]
    return Outcome(tuning, "Power modes", remarks, left)


def _named(switch: Switch, root: Path) -> list[tuple[str, str, Mode]]:
    """The state as it is, and presets: kind, label and mode of each."""
    found = [(LEFT, "as it was, governor left alone", switch.read())]
    for preset in presets(root, dict(switch.knobs)):
        if preset.mode is not None:
            found.append((PRESET, preset.name, preset.mode))
    return found


def reference_of(options: argparse.Namespace, knobs: Knobs, screen: Screen) -> Predictor | None:
    """From the table of another training, of the knobs that this device has."""
    if options.reference is None:
        return None
    table = ModeTable.load(options.reference)
    for remark in table.remarks:
        screen.line(remark, "dim")
    if set(table.knobs) != set(knobs):
        raise UsageError(
            f"--reference {options.reference} has knobs {', '.join(table.knobs)}, this device has "
            f"{', '.join(knobs)}: a table of the same kind of device is needed"
        )
    return Predictor(table.rows, knobs_of(table))


def window_s(options: argparse.Namespace, sampler: Sampler, screen: Screen) -> float:
    """How long a mode is measured: as was said, or as long as the meters need."""
    if options.seconds is None:
        return max(MEASURE_S, sampler.window_s)
    if options.seconds < sampler.window_s:
        screen.line(
            f"--seconds {options.seconds:g}: {', '.join(sampler.sources)} should be given "
            f"{sampler.window_s:g} s to tell the power of a mode.", "bold",
        )  # fmt: skip
    return float(options.seconds)


def held(goal: Goal, sampler: Sampler, screen: Screen) -> Goal:
    """The goal as these meters can hold it; PowerError where they can't at all.

    A limit of power is lowered by what they may be off, whatever is repeated.
    """
    names = " + ".join(sampler.sources)
    if goal.objective != TIME and not sampler.sees_clocks:
        raise PowerError(
            f"power is only estimated here ({names}), and an estimate from processor time knows "
            "nothing of clocks: modes can't be told apart by their energy. Stream a meter in "
            "(TERRAZZO_METER=FILE, docs/power.md), or ask for --objective time"
        )
    if goal.max_power_w is None:
        return goal
    asked = watts_text(goal.max_power_w)
    if sampler.error >= GUESSED_ERROR:
        raise PowerError(
            f"power is a guess here ({names}): a limit of {asked} can't be held by it. Read a "
            "meter and tell terrazzo power calibrate, or stream one in (TERRAZZO_METER=FILE)"
        )
    limit_w = goal.max_power_w / (1 + sampler.error)
    screen.line(
        f"A limit of {asked} on average: {names} may be off by up to {sampler.error:.0%}, so it is "
        f"taken for {watts_text(limit_w)}."
    )
    if BOARD not in sampler.covers:
        screen.line(
            f"It is a limit for the {part_words(sampler.covers)} alone, which are all that is "
            "measured here: the device draws more.", "bold",
        )  # fmt: skip
    return replace(goal, max_power_w=limit_w)


def sooner(goal: Goal, *, bench: StepBench, options: argparse.Namespace) -> Goal:
    """The goal once measuring has taken its time, which is missing before a deadline."""
    if goal.max_step_s is None:
        return goal
    steps = options.steps - bench.spent.steps
    left_s = parse_seconds(options.deadline) - bench.spent.seconds
    if steps <= 0:
        return goal
    return replace(goal, max_step_s=max(left_s, 0.0) / steps)


def _has_time(
    rows: Sequence[Measured], *, bench: StepBench, goal: Goal, options: argparse.Namespace
) -> bool:
    """Whether measuring has not yet cost too much of the training, against its best mode so far."""
    best = min(rows, key=lambda row: goal.value(as_measured(row)))
    lasts_s = TEN_HOURS_S
    if options.deadline:
        lasts_s = parse_seconds(options.deadline)
    elif options.steps:
        lasts_s = options.steps * best.step_s
    return bench.spent.more(best)[0] < MOST_OF_IT * lasts_s

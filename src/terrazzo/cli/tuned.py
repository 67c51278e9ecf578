"""What came of tuning: the picture of all modes, the choice in words, and files of both."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from terrazzo.cli.report import save
from terrazzo.power.phases import Schedule
from terrazzo.power.selector import Choice, Goal, pareto
from terrazzo.power.tuner import Tuning
from terrazzo.records.modes import Measured, Mode, ModeTable
from terrazzo.records.power import joules_text, watts_text
from terrazzo.records.units import count_text, seconds_text
from terrazzo.report.modesview import (
    CHOSEN,
    FORETOLD,
    FRONT,
    MEASURED,
    ModesView,
    Spot,
    keys,
    modes_page,
    picture,
)
from terrazzo.report.screen import Screen


@dataclass
class Outcome:
    """All that is told at the end."""

    tuning: Tuning
    title: str
    remarks: list[str]
    named: list[tuple[str, str, Mode]]
    """Kind, label and mode of presets and of the state before."""
    source: str = ""
    """Of the rows, where they are no measurements of a real device."""


def show_schedule(found: Schedule, screen: Screen, *, has_steps: bool) -> None:
    screen.title("A mode for each phase")
    if not has_steps:
        screen.line("No column says how many steps a phase has: each counts as one step.", "dim")
    for name, option in found.modes:
        screen.line(
            f"{name}: {option.mode.text}; {seconds_text(option.step_s)}, "
            f"{joules_text(option.step_j)}, {watts_text(option.power_w)}"
        )
    if found.saved is None:
        screen.line("No one mode keeps what must hold in all phases: it has to change.")
    elif found.changes:
        screen.line(f"That saves {found.saved:.1%} against one mode for all, changes paid for.")
    else:
        screen.line("Changing modes between phases does not pay: one mode for all.")
    if has_steps:
        screen.line(
            f"All steps: {seconds_text(found.seconds)}, {joules_text(found.joules)}, with "
            f"{count_text(found.changes, 'change')} of mode."
        )


def finish(outcome: Outcome, goal: Goal, options: argparse.Namespace, screen: Screen) -> None:
    view = _view(outcome, goal)
    screen.title(view.title)
    for row in picture(view, width=min(screen.width, 90)):
        screen.raw(row)
    screen.keys(*keys(view), style="dim")
    for text in view.words:
        screen.line(text)
    if options.save is not None:
        rows = tuple(outcome.tuning.rows)
        ModeTable(rows[0].mode.knobs, rows, source=outcome.source).save(options.save)
        screen.line(f"measurements: {options.save}")
    if options.html is not None:
        save(options.html, modes_page(view))
        screen.line(f"page: {options.html}")


def _view(outcome: Outcome, goal: Goal) -> ModesView:
    tuning, best = outcome.tuning, outcome.tuning.choice.best
    front = {option.mode for option in pareto(tuning.options)}
    spots = [
        Spot(
            FRONT if option.mode in front else FORETOLD,
            option.mode.text,
            option.step_s,
            option.step_j,
        )
        for option in tuning.options
        if not option.is_measured
    ]
    spots += [Spot(MEASURED, row.mode.text, row.step_s, row.step_j) for row in tuning.rows]
    rows = {row.mode: row for row in tuning.rows}
    for kind, label, mode in outcome.named:
        row = rows.get(mode)
        if row is not None:
            spots.append(Spot(kind, f"{label} ({mode.text})", row.step_s, row.step_j))
    spots.append(Spot(CHOSEN, best.mode.text, best.step_s, best.step_j))
    words = (
        _chosen(tuning.choice, goal),
        *_peak(tuning.choice, goal),
        *_compared(outcome, rows),
        *outcome.remarks,
    )
    return ModesView(outcome.title, words, tuple(spots))


def _chosen(choice: Choice, goal: Goal) -> str:
    best = choice.best
    return (
        f"Chosen for {goal.objective}: {best.mode.text}; {seconds_text(best.step_s)} "
        f"(±{best.time_doubt:.0%}), {watts_text(best.power_w)} (±{best.power_doubt:.0%}), "
        f"{joules_text(best.step_j)} a step. {choice.words[0].upper()}{choice.words[1:]}."
    )


def _peak(choice: Choice, goal: Goal) -> list[str]:
    """A limit is of the mean: who has a fuse wants to know of more."""
    peak_w = choice.best.peak_w
    if goal.max_power_w is None or peak_w <= goal.max_power_w:
        return []
    return [f"Up to {watts_text(peak_w)} were seen in it for a moment: the limit is of the mean."]


def _compared(outcome: Outcome, rows: dict[Mode, Measured]) -> list[str]:
    """The choice beside what the device would do by itself or in a preset."""
    best = outcome.tuning.choice.best
    names: dict[Mode, list[str]] = {}
    for _, label, mode in outcome.named:
        if mode in rows and mode != best.mode:
            names.setdefault(mode, []).append(label)
    return [
        f"Against {' and '.join(labels)}: {best.step_j / rows[mode].step_j - 1:+.0%} energy, "
        f"{best.step_s / rows[mode].step_s - 1:+.0%} time."
        for mode, labels in names.items()
    ]

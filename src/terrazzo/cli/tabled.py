"""A choice from a table of measurements, without any device."""

from __future__ import annotations

from terrazzo.cli.tuned import Outcome
from terrazzo.errors import UsageError
from terrazzo.power.explorer import as_measured, options_of
from terrazzo.power.formulas import Knobs
from terrazzo.power.phases import Phase, Schedule, schedule
from terrazzo.power.predictor import LEAST, Predictor
from terrazzo.power.selector import Goal, Option, choose
from terrazzo.power.tuner import Tuning, thinned
from terrazzo.records.modes import ModeTable


def knobs_of(table: ModeTable) -> Knobs:
    return {knob: tuple(sorted({row.mode[knob] for row in table.rows})) for knob in table.knobs}


def _foretold(table: ModeTable) -> list[Option]:
    """All combinations of what the table has values of; only its own rows where they are few."""
    if len(table.rows) < LEAST:
        return [as_measured(row) for row in table.rows]
    knobs = knobs_of(table)
    return options_of(Predictor(table.rows, knobs).at(thinned(knobs)), table.rows)


def from_table(table: ModeTable, goal: Goal) -> Outcome:
    options = _foretold(table)
    tuning = Tuning(list(table.rows), choose(options, goal), options)
    kind = "simulated" if table.is_simulated else "measured"
    words = [f"From {len(table.rows)} {kind} modes; nothing was run."]
    if not tuning.choice.best.is_measured:
        words.append("The chosen mode is foretold, not measured: measure it before relying on it.")
    title = "Power modes from a table"
    title += " of a SIMULATED board" if table.is_simulated else ""
    return Outcome(tuning, title, words, [], source=table.source)


def phased(table: ModeTable, goal: Goal) -> Schedule:
    """A mode for each phase; those that do not say how many steps they have count as alike."""
    steps = dict(table.steps)
    parts = table.phases()
    silent = [name or "all" for name in parts if name not in steps]
    if steps and silent:
        raise UsageError(
            f"phase {silent[0]} does not say how many steps it has, others do: fill column steps "
            "in all rows, or in none"
        )
    return schedule(
        [
            Phase(name or "all", steps.get(name, 1.0), _foretold(part))
            for name, part in parts.items()
        ],
        goal,
    )

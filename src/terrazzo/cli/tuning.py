"""``terrazzo power tune``: the best mode for a training, from a few that are measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.boards import load_board
from terrazzo.cli.search import held, reference_of, search, window_s
from terrazzo.cli.tabled import from_table, phased
from terrazzo.cli.tuned import Outcome, finish, show_schedule
from terrazzo.cli.underway import tune_training
from terrazzo.cli.verb import add_verb
from terrazzo.errors import UsageError
from terrazzo.power.benches import MEASURE_S
from terrazzo.power.predictor import LEAST
from terrazzo.power.selector import CONFIDENCE, ENERGY, OBJECTIVES, Goal
from terrazzo.power.simulated import rigged
from terrazzo.power.tuner import MOST
from terrazzo.records.modes import SIMULATED, ModeTable
from terrazzo.records.power import parse_seconds, parse_watts
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo power tune train.py --objective energy --max-power 12W -- --epochs 5
      inside of this training: measure up to 50 modes, choose, go on in the best, put all back;
      what follows -- is the script's own
  terrazzo power tune train.py --deadline 6h --steps 20000
      the least energy with which 20000 steps are done in six hours
  terrazzo power tune --from table.csv --max-slowdown 1.2 --html modes.html
      from a table with a column for each knob, time_s and power_w; with a column phase, a mode for
      each phase
  terrazzo power tune --simulate orin-like
      on a simulated board, to see how it goes; the numbers say nothing about a real one

Modes are changed by a small helper with root's rights (sudo -n), training itself needs none;
docs/power.md says how to allow it. What was before is put back at the end, also after Ctrl-C, and
after a kill by terrazzo power restore.
"""


def add_tune(verbs: Commands) -> None:
    parser = add_verb(verbs, "tune", "find the best power mode for a training", EXAMPLES)
    _add_flags(parser)
    parser.add_argument("script", nargs="?", help="the Python file that trains")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...",
        help="arguments of the script; options that tune knows are its own before a --",
    )  # fmt: skip
    parser.set_defaults(command=tune_power)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default=ENERGY, help="what shall be least"
    )
    parser.add_argument(
        "--max-power",
        metavar="WATTS",
        help="most that the device may draw, as a mean of some seconds: 12W",
    )
    parser.add_argument("--max-slowdown", type=float, metavar="TIMES", help="than the fastest: 1.2")
    parser.add_argument("--deadline", metavar="TIME", help="for all --steps: 6h")
    parser.add_argument("--steps", type=int, help="that the whole training makes")
    parser.add_argument(
        "--confidence", type=float, default=CONFIDENCE, metavar="PART",
        help="with which limits hold (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=int, default=MOST, help="most that are measured (default: %(default)d)"
    )
    parser.add_argument(
        "--seconds", type=float,
        help=f"that each is measured (default: {MEASURE_S:g}, more where a meter needs it)",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="table", type=Path, metavar="FILE", help="a CSV, no device")
    parser.add_argument("--simulate", metavar="BOARD", help="a simulated board: orin-like, pi-like")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="a CSV of another training on such a device"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was measured as CSV")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the picture as a page")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the training records")


def take_own(options: argparse.Namespace) -> None:
    """``tune train.py --objective energy -- --epochs 5``: our options may follow the script."""
    words = list(options.arguments)
    place = words.index("--") if "--" in words else len(words)
    flags = argparse.ArgumentParser(prog="terrazzo power tune", add_help=False, allow_abbrev=False)
    _add_flags(flags)
    _, rest = flags.parse_known_args(words[:place], options)
    options.arguments = [*rest, *words[place + 1 :]]


def tune_power(options: argparse.Namespace) -> int:
    take_own(options)
    goal = _goal(options)
    sources = [options.table is not None, options.simulate is not None, options.script is not None]
    if sum(sources) != 1:
        raise UsageError("tune what? Give a script, or --from table.csv, or --simulate orin-like")
    if options.modes < LEAST:
        raise UsageError(f"--modes {options.modes}: at least {LEAST} have to be measured")
    if options.seconds is not None and options.seconds <= 0:
        raise UsageError(f"--seconds {options.seconds:g}: a mode is measured for some seconds")
    _require_places(options)
    screen = Screen()
    if options.table is not None:
        table = ModeTable.load(options.table)
        for remark in table.remarks:
            screen.line(remark, "dim")
        if len(table.phases()) > 1:
            show_schedule(phased(table, goal), screen, has_steps=bool(table.steps))
            return 0
        finish(from_table(table, goal), goal, options, screen)
    elif options.simulate is not None:
        finish(_simulated(options, goal, screen), goal, options, screen)
    else:
        tune_training(options, goal, screen)
    return 0


def _goal(options: argparse.Namespace) -> Goal:
    longest = None
    if options.deadline:
        if not options.steps or options.steps < 1:
            raise UsageError("--deadline also needs --steps, how many the whole training makes")
        longest = parse_seconds(options.deadline) / options.steps
    return Goal(
        options.objective,
        max_power_w=parse_watts(options.max_power) if options.max_power else None,
        max_slowdown=options.max_slowdown,
        max_step_s=longest,
        confidence=options.confidence,
    )


def _require_places(options: argparse.Namespace) -> None:
    """What is written at the end of an hour of measuring must have somewhere to go."""
    for flag, path in (("--save", options.save), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path}: no file can be written there; make its folder first")


def _simulated(options: argparse.Namespace, goal: Goal, screen: Screen) -> Outcome:
    board = load_board(options.simulate)
    with rigged(board) as (rig, bench):
        reference = reference_of(options, bench.knobs, screen)
        bench.measure_s = window_s(options, bench.sampler, screen)
        limited = held(goal, bench.sampler, screen)
        outcome = search(bench, limited, options, screen, root=rig.root, reference=reference)
    outcome.title = f"Power modes of a SIMULATED board ({board.name})"
    outcome.source = f"{SIMULATED} {board.name}"
    outcome.remarks.insert(0, "Simulated: these numbers say nothing about a real board.")
    return outcome

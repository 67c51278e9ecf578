"""``terrazzo power tune``: the best mode for a training, from a few that are measured."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.boards import load_board
from terrazzo.cli.tuned import Outcome, finish, show_schedule
from terrazzo.cli.verb import add_verb
from terrazzo.errors import PowerError, UsageError
from terrazzo.meters.estimator import kept, machine_busy_s
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.power.assistant import Assistant
from terrazzo.power.benches import MEASURE_S, StepBench, StepFile
from terrazzo.power.explorer import as_measured, options_of
from terrazzo.power.formulas import Knobs
from terrazzo.power.keeper import STATE, Keeper
from terrazzo.power.panel import Panel, Switch
from terrazzo.power.phases import Phase, Schedule, schedule
from terrazzo.power.predictor import LEAST, Predictor
from terrazzo.power.presets import presets
from terrazzo.power.selector import (
    CONFIDENCE,
    ENERGY,
    OBJECTIVES,
    Goal,
    Option,
    choose,
)
from terrazzo.power.simulated import rigged
from terrazzo.power.sysfs import Sysfs
from terrazzo.power.tuner import MOST, Tuning, thinned, tune
from terrazzo.records.modes import Mode, ModeTable
from terrazzo.records.power import (
    METER_FILE,
    calibration_path,
    joules_text,
    parse_seconds,
    parse_watts,
)
from terrazzo.records.run import RunFolder
from terrazzo.records.units import seconds_text
from terrazzo.report.modesview import LEFT, PRESET
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
TEN_HOURS_S = 36_000.0
EVERY_CALL, EVERY_CALLS = "TERRAZZO_EVERY_CALL", "5000"
CALM_S = 20.0


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
    parser.add_argument("--max-power", metavar="WATTS", help="most that the device may draw: 12W")
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
        "--seconds", type=float, default=MEASURE_S,
        help="that each is measured (default: %(default)g)",
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
    if options.seconds <= 0:
        raise UsageError(f"--seconds {options.seconds:g}: a mode is measured for some seconds")
    _require_places(options)
    screen = Screen()
    if options.table is not None:
        table = ModeTable.load(options.table)
        for remark in table.remarks:
            screen.line(remark, "dim")
        if len(table.phases()) > 1:
            show_schedule(_phased(table, goal), screen)
            return 0
        finish(_from_table(table, goal), goal, options, screen)
    elif options.simulate is not None:
        finish(_simulated(options, goal, screen), goal, options, screen)
    else:
        _trained(options, goal, screen)
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


# ---- from a table ------------------------------------------------------------------------------


def _knobs(table: ModeTable) -> Knobs:
    return {knob: tuple(sorted({row.mode[knob] for row in table.rows})) for knob in table.knobs}


def _foretold(table: ModeTable) -> list[Option]:
    """All combinations of what the table has values of; only its own rows where they are few."""
    if len(table.rows) < LEAST:
        return [as_measured(row) for row in table.rows]
    knobs = _knobs(table)
    return options_of(Predictor(table.rows, knobs).at(thinned(knobs)), table.rows)


def _from_table(table: ModeTable, goal: Goal) -> Outcome:
    options = _foretold(table)
    tuning = Tuning(list(table.rows), choose(options, goal), options)
    words = [f"From {len(table.rows)} measured modes; nothing was run."]
    if not tuning.choice.best.is_measured:
        words.append("The chosen mode is foretold, not measured: measure it before relying on it.")
    return Outcome(tuning, "Power modes from a table", words, [])


def _phased(table: ModeTable, goal: Goal) -> Schedule:
    return schedule(
        [Phase(name or "all", 1.0, _foretold(part)) for name, part in table.phases().items()], goal
    )


# ---- on a board --------------------------------------------------------------------------------


def _reference(options: argparse.Namespace, knobs: Knobs) -> Predictor | None:
    """From the table of another training, of the knobs that this device has."""
    if options.reference is None:
        return None
    table = ModeTable.load(options.reference)
    if set(table.knobs) != set(knobs):
        raise UsageError(
            f"--reference {options.reference} has knobs {', '.join(table.knobs)}, this device has "
            f"{', '.join(knobs)}: a table of the same kind of device is needed"
        )
    return Predictor(table.rows, _knobs(table))


def _require_places(options: argparse.Namespace) -> None:
    """What is written at the end of an hour of measuring must have somewhere to go."""
    for flag, path in (("--save", options.save), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path}: no file can be written there; make its folder first")


def _simulated(options: argparse.Namespace, goal: Goal, screen: Screen) -> Outcome:
    board = load_board(options.simulate)
    with rigged(board) as (rig, bench):
        bench.measure_s = options.seconds
        named = _named(bench.switch, rig.root)
        outcome = _measured(
            bench, goal, options, named, screen, reference=_reference(options, bench.knobs)
        )
    outcome.title = f"Power modes of a SIMULATED board ({board.name})"
    outcome.remarks.insert(0, "Simulated: these numbers say nothing about a real board.")
    return outcome


def _named(switch: Switch, root: Path) -> list[tuple[str, str, Mode]]:
    found = [(LEFT, "as it was, governor left alone", switch.read())]
    for preset in presets(root, dict(switch.knobs)):
        if preset.mode is not None:
            found.append((PRESET, preset.name, preset.mode))
    return found


def _measured(
    bench: StepBench,
    goal: Goal,
    options: argparse.Namespace,
    named: list[tuple[str, str, Mode]],
    screen: Screen,
    *,
    reference: Predictor | None,
) -> Outcome:
    tuning = tune(
        bench,
        goal,
        most=options.modes,
        also=[mode for _, _, mode in named],
        reference=reference,
        say=lambda text: screen.line(text, "dim"),
    )
    chosen = next(row for row in tuning.rows if row.mode == tuning.choice.best.mode)
    more_s, more_j = bench.spent.more(chosen)
    remarks = [
        f"Measuring {len(tuning.rows)} modes took {seconds_text(bench.spent.seconds)}, in which "
        f"{bench.spent.steps:.0f} steps were trained: {seconds_text(max(more_s, 0))} and "
        f"{joules_text(max(more_j, 0))} more than in the chosen mode, or "
        f"{max(more_s, 0) / TEN_HOURS_S:.2%} of ten hours."
    ]
    if not bench.sampler.is_measured:
        remarks.append("Power is estimated here, not measured: terrazzo power show says why.")
    remarks += [f"Left out: {words}" for words in tuning.refused]
    remarks += list(bench.sampler.doubts)
    return Outcome(tuning, "Power modes", remarks, named)


def _trained(options: argparse.Namespace, goal: Goal, screen: Screen) -> None:
    """The script runs from its first step to its last; modes change under it."""
    if not Path(options.script).is_file():
        raise UsageError(f"no script {options.script}; give the path of a Python file")
    with _orderly(), _switch(options.root, screen) as (switch, undo):
        if not switch.knobs:
            raise PowerError(
                "this device has no knobs that could be changed (terrazzo power show); with a "
                "table of measurements, use --from"
            )
        reference = _reference(options, switch.knobs)
        name = Path(options.script).stem
        folder = options.run_dir or RunFolder.create(Path("runs"), f"tune-{name}").path
        with _sampler(options.root) as sampler, _started(options, folder) as process:
            bench = StepBench(
                switch,
                sampler,
                StepFile(folder),
                is_running=lambda: process.poll() is None,
                measure_s=options.seconds,
            )
            problem = _steer(bench, goal, options, screen, reference=reference, undo=undo)
            status = process.wait()
    screen.line("The device is as it was before.")
    if status:
        raise PowerError(f"the training ended with status {status}; its output is above")
    if problem is not None:
        raise problem


@contextmanager
def _started(options: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The training; whatever happens here, it does not outlive this command."""
    command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "1", "--run-dir", str(folder)]
    command += [options.script, *options.arguments]
    environment = {**os.environ, EVERY_CALL: EVERY_CALLS}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        except BaseException:
            _end(process)
            raise


def _steer(
    bench: StepBench,
    goal: Goal,
    options: argparse.Namespace,
    screen: Screen,
    *,
    undo: Callable[[], None],
    reference: Predictor | None = None,
) -> Exception | None:
    """Tunes, and leaves the device in the chosen mode; training goes on also where that fails."""
    try:
        named = _named(bench.switch, options.root)
        outcome = _measured(bench, goal, options, named, screen, reference=reference)
        finish(outcome, goal, options, screen)
        bench.switch.apply(outcome.tuning.choice.best.mode)
    except Exception as error:  # whatever it is, hours of training are worth more
        try:
            undo()
        except PowerError as other:
            screen.line(f"not tuned: {error}. Training goes on. {other}", "bold")
        else:
            screen.line(f"not tuned: {error}. Training goes on as it was.", "bold")
        return error
    screen.line("Training goes on in this mode.", "bold")
    return None


@contextmanager
def _switch(root: Path, screen: Screen) -> Iterator[tuple[Switch, Callable[[], None]]]:
    """The panel for root, else a helper that has the right; and what puts the device back."""
    if os.geteuid() != 0 and root == Path("/"):
        with Assistant() as assistant:
            yield assistant, assistant.restore
        return
    panel = Panel.find(Sysfs(root))
    state = STATE if root == Path("/") else root / "state.json"
    with Keeper(state).borrowed(panel, say=screen.line) as before:
        yield panel, lambda: panel.restore(before)


@contextmanager
def _sampler(root: Path) -> Iterator[Sampler]:
    told = kept(calibration_path(os.environ), root)
    named = os.environ.get(METER_FILE)
    found = find(
        root,
        calibration=told,
        external=Path(named) if named else None,
        busy_s=machine_busy_s(Path("/")),
    )
    with Sampler(found.used) as sampler:
        yield sampler


@contextmanager
def _orderly() -> Iterator[None]:
    """A request to end, or a terminal that is gone, ends as Ctrl-C does: the device is put back."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(CALM_S)
    except subprocess.TimeoutExpired:
        process.kill()

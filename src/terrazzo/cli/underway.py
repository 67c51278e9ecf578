"""A training that is tuned while it is under way: modes change under it, and it goes on."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from terrazzo.cli.following import PHASES, follow
from terrazzo.cli.search import held, reference_of, search, window_s
from terrazzo.cli.tuned import Outcome, finish
from terrazzo.errors import PowerError, UsageError
from terrazzo.meters.busy import machine_busy_s
from terrazzo.meters.estimator import kept
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.power.assistant import Assistant
from terrazzo.power.benches import StepBench, StepFile
from terrazzo.power.keeper import STATE, Keeper
from terrazzo.power.panel import Panel, Switch
from terrazzo.power.predictor import Predictor
from terrazzo.power.selector import Goal
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.event import EVERY_CALL
from terrazzo.records.power import METER_FILE, calibration_path
from terrazzo.records.run import RunFolder
from terrazzo.report.screen import Screen

EVERY_CALLS = "5000"
CALM_S = 20.0


def tune_training(options: argparse.Namespace, goal: Goal, screen: Screen) -> None:
    """The script runs from its first step to its last; modes change under it."""
    if not Path(options.script).is_file():
        raise UsageError(f"no script {options.script}; give the path of a Python file")
    with _orderly(), _switch(options.root, screen) as (switch, undo):
        if not switch.knobs:
            raise PowerError(
                "this device has no knobs that could be changed (terrazzo power show); with a "
                "table of measurements, use --from"
            )
        reference = reference_of(options, switch.knobs, screen)
        name = Path(options.script).stem
        folder = options.run_dir or RunFolder.create(Path("runs"), f"tune-{name}").path
        with _sampler(options.root, screen) as sampler:
            limited = held(goal, sampler, screen)
            measure_s = window_s(options, sampler, screen)
            with _started(options, folder) as process:
                bench = StepBench(
                    switch,
                    sampler,
                    StepFile(folder),
                    is_running=lambda: process.poll() is None,
                    measure_s=measure_s,
                )
                found = steer(bench, limited, options, screen, reference=reference, undo=undo)
                if isinstance(found, Outcome):
                    follow(
                        bench, found.tuning, limited,
                        folder=folder, undo=undo, save=options.save, screen=screen,
                    )  # fmt: skip
                status = process.wait()
    screen.line("The device is as it was before.")
    if status:
        raise PowerError(f"the training ended with status {status}; its output is above")
    if isinstance(found, Exception):
        raise found


@contextmanager
def _started(options: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The training; whatever happens here, it does not outlive this command."""
    command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "1", "--run-dir", str(folder)]
    command += [options.script, *options.arguments]
    environment = {**os.environ, EVERY_CALL: EVERY_CALLS, PHASES: "1"}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        except BaseException:
            _end(process)
            raise


def steer(
    bench: StepBench,
    goal: Goal,
    options: argparse.Namespace,
    screen: Screen,
    *,
    undo: Callable[[], None],
    reference: Predictor | None = None,
) -> Outcome | Exception:
    """Tunes, and leaves the device in the chosen mode; training goes on also where that fails."""
    try:
        outcome = search(bench, goal, options, screen, root=options.root, reference=reference)
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
    return outcome


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
def _sampler(root: Path, screen: Screen) -> Iterator[Sampler]:
    told = kept(calibration_path(os.environ), root)
    named = os.environ.get(METER_FILE)
    found = find(
        root,
        calibration=told,
        external=Path(named) if named else None,
        busy_s=machine_busy_s(Path("/")),
    )
    for problem in found.problems[: bool(named)]:  # of the meter that was asked for
        screen.line(f"not used: {problem}", "bold")
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

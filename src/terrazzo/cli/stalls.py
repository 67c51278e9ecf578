"""``terrazzo data stalls``: of each step, what is computing and what is waiting for input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.model import FORM, ModelReference
from terrazzo.cli.place import Place, add_lab_flags, say
from terrazzo.cli.recording import launch_recorded
from terrazzo.cli.report import save
from terrazzo.cli.run import RUNS, bring_code
from terrazzo.cli.stallview import page, show
from terrazzo.cli.storage_job import STORAGE_FILE
from terrazzo.cli.verb import add_verb
from terrazzo.cluster import Hosts
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import RunError, UsageError
from terrazzo.feed.diagnosis import Seen, diagnose
from terrazzo.lab.hosts import LabHosts
from terrazzo.records.run import RunFolder
from terrazzo.records.storage import Storage
from terrazzo.records.trial import COLD, MODES, USUAL, Trial
from terrazzo.records.units import seconds_text
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TRIAL = "TERRAZZO_TRIAL"
"""The variable in which ``terrazzo.init`` finds the trial; the same name as there."""
STEPS, MOST_STEPS, USUAL_TIMES = 20, 95, 3
STORAGE_S = 3.0
EXAMPLES = """\
examples:
  terrazzo data stalls train.py --epochs 5
      your script, four times for 20 steps each
  terrazzo data stalls --on 3 --steps 40 train.py
      with three devices: the first reads, and sends the others their parts
  sudo terrazzo data stalls --on 1xpi4 --slow-storage train.py
      as on a board with its card
  terrazzo data stalls --model net.py:build --data net.py:pictures --batch 16
      a model and a data set, without a script

The script must feed its net by tz.feed. It is run with the same batch again and again (nothing but
computing), with files in memory, with files from storage, and as it is; then it is ended. What else
it does, such as writing checkpoints, it does four times.
A file counts as read from storage because it is dropped from the page cache when Python opens it.
Exit status: 0 analysed, 2 not run.
"""


def add_stalls(below: Commands) -> None:
    parser = add_verb(below, "stalls", "find out where a training waits for its input", EXAMPLES)
    parser.add_argument(
        "--on", default="1", metavar="N",
        help="devices: 4 processes here, 6xpi3 emulated, or a cluster.toml (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N",
        help="steps of each of the four trials (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", help="instead of a script: FILE.py:CALLABLE, or of the zoo"
    )
    parser.add_argument(
        "--data", metavar="DATA", help="a data set or loader for it, as FILE.py:CALLABLE"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="samples a step of a data set (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument(
        "--no-storage", action="store_true", help="do not measure the medium the data lie on"
    )
    add_lab_flags(parser)
    parser.add_argument("script", nargs="?", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    parser.set_defaults(command=stalls)


def stalls(options: argparse.Namespace) -> int:
    command, name = _command(options)
    if not 3 <= options.steps <= MOST_STEPS:
        raise UsageError(f"--steps {options.steps}: give 3 to {MOST_STEPS}, which are all recorded")
    place = Place.read(options, real=True)
    parent = RunFolder.create(RUNS, f"stalls-{name}")
    seen: dict[str, Seen] = {}
    with place.open() as hosts:
        if isinstance(hosts, SshHosts) and options.script:
            command[1] = bring_code(hosts, Path(options.script))
        for mode in MODES:
            trial = Trial(mode, _steps(mode, options.steps))
            say(f"{mode}: {_meaning(mode)}, {trial.steps} steps")
            seen[mode] = _trial(trial, command, hosts, parent.path / mode)
        is_read = seen[COLD].stalls.read_bytes > 0 and not options.no_storage
        folder = seen[COLD].facts.folder if is_read else ""
        storage = _storage(folder, hosts, parent.path / "storage")
    found = diagnose(seen, storage=storage)
    screen = Screen()
    show(found, seen, screen, title=name)
    found.save(options.save or parent.path / "stalls.json")
    target = options.html or parent.path / "stalls.html"
    save(target, page(found, seen, title=name))
    screen.line()
    screen.line(f"page: {target}")
    return 0


def _steps(mode: str, asked: int) -> int:
    """As the script has it workers come one by one, while steps are watched: that takes longer."""
    return min(USUAL_TIMES * asked, MOST_STEPS) if mode == USUAL else asked


def _meaning(mode: str) -> str:
    return {
        "synthetic": "the same batch again and again",
        "warm": "files in memory",
        "cold": "files from storage",
        "usual": "files from storage, as the script has it",
    }[mode]


def _command(options: argparse.Namespace) -> tuple[list[str], str]:
    if options.script and (options.model or options.data):
        raise UsageError("a script brings its own model and data: leave --model and --data out")
    if options.script:
        if not Path(options.script).is_file():
            raise UsageError(f"no script {options.script}; give the path of a Python file")
        return [sys.executable, options.script, *options.arguments], Path(options.script).stem
    if not options.model or not options.data:
        raise UsageError(
            "nothing to look at: give a training script, or --model net.py:build and --data "
            "net.py:pictures"
        )
    if options.batch < 1:
        raise UsageError(f"--batch {options.batch}: give 1 or more")
    ModelReference.parse(options.model)
    data = ModelReference.parse(options.data)
    if not data.source:
        raise UsageError(f"--data {data} is no data set: {FORM}")
    job = ["-m", "terrazzo.cli.stalls_job", options.model, options.data, str(options.batch)]
    return [sys.executable, *job], data.name


def _trial(trial: Trial, command: Sequence[str], hosts: Hosts, path: Path) -> Seen:
    folder = RunFolder.take(path)
    if isinstance(hosts, LabHosts | SshHosts):
        hosts.note_run(path)
    result = launch_recorded(
        list(command), hosts, folder=folder, name=trial.mode, env={TRIAL: trial.to_text()}
    )
    if result.failure:
        raise RunError(f"the {trial.mode} trial failed: {result.failure.in_short}")
    return Seen.read(path)


def _storage(folder: str, hosts: Hosts, path: Path) -> Storage | None:
    """The medium that files came from, measured by the device that reads them."""
    if not folder:
        return None
    say(f"storage: the medium under {folder}, up to {seconds_text(STORAGE_S)}")
    run = RunFolder.take(path)
    job = [sys.executable, "-m", "terrazzo.cli.storage_job", folder, str(STORAGE_S)]
    result = launch_recorded(job, hosts, folder=run, name="storage")
    if result.failure or not (path / STORAGE_FILE).exists():
        say("storage could not be measured: predictions take readers as not in each other's way")
        return None
    return Storage.load(path / STORAGE_FILE)

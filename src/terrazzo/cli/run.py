"""``terrazzo run``: a training script, once per device, recorded in a folder of its own."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli import planned, resume
from terrazzo.cli.place import Place, add_lab_flags, say
from terrazzo.cli.recording import launch_recorded
from terrazzo.cluster import Hosts, LaunchResult, launch
from terrazzo.cluster.code import Code
from terrazzo.cluster.launch import nobody
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import UsageError
from terrazzo.lab import LabHosts
from terrazzo.records.run import RunFolder
from terrazzo.records.units import bytes_text, count_text

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

RUNS = Path("runs")
OWN = (
    "--on", "--grace", "--no-recovery", "--restarts", "--run-dir", "--no-record", "--presets",
    "--unshaped", "--no-verify", "--slow-storage", "--resume", "--plan",
)  # fmt: skip
EXAMPLES = """\
examples:
  terrazzo run --on 3 train.py --epochs 5
      start train.py three times on this machine, one process per device
  terrazzo run --on 2 --grace 30 train.py
      after a failure give the other device 30 s to save its work
  terrazzo run --on 2 --run-dir runs/first-try train.py
      record into that folder; look at it with terrazzo report runs/first-try
  terrazzo run --resume runs/20260131-142530-train --on 2 train.py --epochs 5
      go on from its last checkpoint, on two devices; with nothing but --resume runs/... the
      script, its arguments and the devices are those of that run
  terrazzo run --on cluster.toml --plan plan.json train.py
      by a plan that terrazzo plan --save has kept: on its devices, each in its power mode, which is
      put back at the end (docs/power.md)
  terrazzo run --on cluster.toml train.py --epochs 5
      on real devices, over SSH: see terrazzo cluster --help and docs/clusters.md
  sudo terrazzo run --on 6xpi3 train.py
      on six emulated boards; mixed: --on 2xpi5,3xpi3; sharing the air: --on 4xpi4:wifi

Options of terrazzo run stand before the script; what follows the script is the script's own, but
for an --on right after it where there is none before. Each process gets torchrun's environment
variables; terrazzo.init() reads them. What the devices do is recorded in a new folder under runs/,
unless --no-record says otherwise. A device that is lost (power, network, killed) does not end the
run: the others go on. Ctrl-C ends all devices. The exit status is that of the first device that
failed (128 + n for signal n), or 0.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script on several devices",
        description="Run a Python script once per device, with its output under the device's name.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--on", metavar="N", help="devices: 4 processes here, 6xpi3 emulated, or a cluster.toml"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long the others may go on after one device failed (default: %(default)g)",
    )
    parser.add_argument(
        "--no-recovery",
        action="store_true",
        help="end the run when a device is lost, instead of going on without it",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=2,
        metavar="N",
        help="how often a lost device is started again, where it can join (default: %(default)d)",
    )
    recording = parser.add_mutually_exclusive_group()
    recording.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="record into this folder: new or empty"
    )
    recording.add_argument("--no-record", action="store_true", help="record nothing")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on from the last checkpoint of this run; without a script, with that run's own",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="train by this plan, with its devices and power modes, unless the script has its own",
    )
    add_lab_flags(parser)
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    if options.on is None:
        _take_on_after_script(options)
    place = Place.read(options, real=True)
    if not Path(options.script).is_file():
        raise UsageError(f"no script {options.script}; give the path of a Python file")
    if options.grace < 0:
        raise UsageError(f"--grace {options.grace:g} is negative; give seconds, such as 10")
    if options.resume and options.run_dir and options.resume.name == options.run_dir.name:
        raise UsageError(  # devices know a run by that name alone
            f"--run-dir {options.run_dir} and --resume {options.resume} have one name: choose "
            "another for the new run"
        )
    if options.restarts < 0:
        raise UsageError(f"--restarts {options.restarts} is negative; give 0 for never")
    plan = None if options.plan is None else planned.read_plan(options.plan)
    if plan is not None:
        place = planned.seated(place, plan, options.plan)
    command = [sys.executable, options.script, *options.arguments]
    with place.open() as hosts:
        if isinstance(hosts, SshHosts):
            command[1] = bring_code(hosts, Path(options.script))
        given = {}
        if plan is not None:
            given = planned.environment(plan, options.plan, hosts=hosts, place=place)
        if options.no_record:
            survive = not options.no_recovery and len(hosts.names) > 1
            result = launch(
                command, hosts, env=given, grace_s=options.grace, survive=survive,
                per_device_env=_resumed(options, hosts),
            )  # fmt: skip
        else:
            result = _recorded(command, hosts, options, given=given)
    if result.failure:
        print(f"terrazzo: error: {result.failure}", file=sys.stderr)
    return result.exit_status


def bring_code(hosts: SshHosts, script: Path) -> str:
    """Copies the code to all devices; gives the script's path there."""
    limit = hosts.cluster.copy_limit_bytes
    code = Code.of_script(script, here=Path.cwd(), limit_bytes=limit)
    if code.left_out:
        say(f"not copied, because git does not track it: {', '.join(code.left_out[:5])}")
    sent = _sent(dict(zip(hosts.names, hosts.bring(code), strict=True)))
    size = f"{count_text(len(code.files), 'file')}, {bytes_text(code.size_bytes)}"
    say(f"code {code.name}: {size}; {sent}")
    return os.path.relpath(script.resolve(), code.root / code.directory)


def _sent(counts: dict[str, int]) -> str:
    """How many files each device lacked, Terrazzo's own among them."""
    if not any(counts.values()):
        return "all devices have it already"
    told = (f"{count} to {name}" for name, count in counts.items())
    return f"files sent, with Terrazzo's own: {', '.join(told)}"


def _take_on_after_script(options: argparse.Namespace) -> None:
    """``run train.py --on 3``: ours, where nothing else that follows could be meant for us."""
    words = list(options.arguments)
    place = next((i for i, word in enumerate(words) if _flag(word) == "--on"), None)
    if place is None or (words[place] == "--on" and place + 1 == len(words)):
        again = shlex.join(["terrazzo", "run", "--on", "2", options.script, *words[:place]])
        raise UsageError(f"--on is missing: on how many devices? Such as: {again}")
    size = 1 if "=" in words[place] else 2
    value = words[place].partition("=")[2] if size == 1 else words[place + 1]
    rest = words[:place] + words[place + size :]
    again = shlex.join(["terrazzo", "run", "--on", value, options.script, *rest])
    unsure = [_flag(word) for word in rest if _flag(word) in OWN]
    if place > 0 or unsure:
        also = f" (with {' and '.join(unsure)} before {options.script}, if meant for terrazzo run)"
        raise UsageError(
            f"--on stands among the arguments of {options.script}; put it first: "
            f"{again}{also if unsure else ''}"
        )
    options.on, options.arguments = value, rest


def _flag(word: str) -> str:
    return word.partition("=")[0]


def _resumed(options: argparse.Namespace, hosts: Hosts) -> list[dict[str, str]] | None:
    return None if options.resume is None else resume.environments(options.resume, hosts)


def _recorded(
    command: list[str], hosts: Hosts, options: argparse.Namespace, *, given: dict[str, str]
) -> LaunchResult:
    name = Path(options.script).stem
    resumed = _resumed(options, hosts)
    folder = RunFolder.take(options.run_dir) if options.run_dir else RunFolder.create(RUNS, name)
    if isinstance(hosts, LabHosts | SshHosts):
        hosts.note_run(folder.path)
    newcomer = nobody
    if isinstance(hosts, SshHosts) and options.plan is None:
        hosts.watch(Path(options.on))
        newcomer = hosts.newcomer
    try:
        result = launch_recorded(
            command,
            hosts,
            folder=folder,
            name=name,
            grace_s=options.grace,
            survive=not options.no_recovery and len(hosts.names) > 1,
            restarts=options.restarts,
            board=True,
            on=options.on,
            typed=[sys.executable, options.script, *options.arguments],
            env=given,
            per_device_env=resumed,
            newcomer=newcomer,
        )
    except KeyboardInterrupt:
        words = _kept(folder, options, is_broken=True) or "nothing was recorded yet"
        raise KeyboardInterrupt(f"; {words}") from None
    words = _kept(folder, options, is_broken=result.exit_status != 0)
    if words:
        print(f"terrazzo: {words}", file=sys.stderr)
    return result


def _kept(folder: RunFolder, options: argparse.Namespace, *, is_broken: bool) -> str:
    """Where the records are, and how to go on where the run was broken off; a folder of ours in
    which there are none is removed."""
    if folder.has_records:
        look = f"recorded in {folder.path}; look at it with: terrazzo report {folder.path}"
        again = f"; go on with: terrazzo run --resume {folder.path}"
        return look + (again if is_broken and folder.has_checkpoints else "")
    if options.run_dir is None:
        folder.discard()  # the script made no use of Terrazzo: there is nothing to look at
    return ""

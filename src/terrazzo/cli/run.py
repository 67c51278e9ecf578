"""``terrazzo run``: a training script, once per device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cluster import LocalHosts, launch
from terrazzo.errors import UsageError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo run --on 3 train.py --epochs 5
      start train.py three times on this machine, one process per device
  terrazzo run --on 2 --grace 30 train.py
      after a failure give the other device 30 s to save its work

Each process gets torchrun's environment variables; terrazzo.init() reads them. The exit status is
that of the first device that failed (128 + n for signal n), or 0.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script on several devices",
        description="Run a Python script once per device, with its output under the device's name.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--on", required=True, metavar="N", help="how many local devices")
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long the others may go on after one device failed (default: %(default)g)",
    )
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to the script"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    hosts = LocalHosts.parse(options.on)
    if not Path(options.script).is_file():
        raise UsageError(f"no script {options.script}; give the path of a Python file")
    if options.grace < 0:
        raise UsageError(f"--grace {options.grace:g} is negative; give seconds, such as 10")
    command = [sys.executable, options.script, *options.arguments]
    result = launch(command, hosts.devices, grace_s=options.grace)
    if result.failure:
        print(f"terrazzo: error: {result.failure}", file=sys.stderr)
    return result.exit_status

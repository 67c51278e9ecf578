"""The entry point: reads the command, runs it, and turns our errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from terrazzo.cli import check, run
from terrazzo.errors import TerrazzoError

BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

DESCRIPTION = "Train one CNN exactly across several small devices."
EXAMPLES = """\
examples:
  terrazzo check net.py:build --input 2x3x224x224 --on 3
      does this model give the same numbers on three devices as on one?
  terrazzo run --on 3 train.py --epochs 5
      run a training script as three devices on this machine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 found wrong, 2 bad usage."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except TerrazzoError as error:
        print(f"terrazzo: error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; point stdout elsewhere so that the flush at exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="terrazzo",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--version", action="version", version=f"terrazzo {metadata.version('terrazzo')}"
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check.add_to(commands)
    run.add_to(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())

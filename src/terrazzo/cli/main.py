"""The entry point: reads the command, runs it, and turns our errors into one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from terrazzo.errors import TerrazzoError

if TYPE_CHECKING:
    import argparse

BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

DESCRIPTION = "Train one CNN exactly across several small devices."
EXAMPLES = """\
examples:
  terrazzo demo
      train a small detector on four devices and on one, and compare: about two minutes
  terrazzo check net.py:build --input 2x3x224x224 --on 3
      does this model give the same numbers on three devices as on one?
  terrazzo plan net.py:build --input 1x3x1024x1024 --memory 900MiB
      how it would be cut, what a training step needs, and what fitting it into less costs
  terrazzo run --on 3 train.py --epochs 5
      run a training script as three devices on this machine
  sudo terrazzo run --on 6xpi3 train.py
      run it on six emulated boards: shaped links, slow cores, little memory
  terrazzo bench race --on 2 --model yolov2-small --batch 2
      beside what you would pick instead: one device, DDP, FSDP2, a pipeline
  terrazzo report
      what the latest run did: losses, memory, traffic, time, as words and as a page

Each command has more examples: terrazzo run --help. Start with docs/your-script.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 found wrong, 2 bad usage."""
    for stream in (sys.stdout, sys.stderr):
        _forgive(stream)
    try:
        from terrazzo.cli.resume import completed

        options = parser().parse_args(completed(sys.argv[1:] if arguments is None else arguments))
        return int(options.command(options))
    except TerrazzoError as error:
        print(f"terrazzo: error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt as stop:
        print(f"terrazzo: stopped by Ctrl-C{stop}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; point stdout elsewhere so that the flush at exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _forgive(stream: TextIO) -> None:
    """A terminal without UTF-8 shows a question mark for what it lacks, not a traceback."""
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")


def parser() -> argparse.ArgumentParser:
    # Loaded only now: Ctrl-C in the meantime ends as quietly as it does later.
    import argparse
    from importlib import metadata

    from terrazzo.cli import (
        bench,
        check,
        cluster,
        completion,
        data,
        demo,
        lab,
        plan,
        power,
        report,
        run,
    )  # fmt: skip

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
    demo.add_to(commands)
    check.add_to(commands)
    plan.add_to(commands)
    run.add_to(commands)
    report.add_to(commands)
    cluster.add_to(commands)
    lab.add_to(commands)
    data.add_to(commands)
    power.add_to(commands)
    bench.add_to(commands)
    completion.add_to(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())

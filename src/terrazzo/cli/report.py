"""``terrazzo report``: a run folder as words in the terminal, a page and a trace."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.errors import UsageError
from terrazzo.records import document
from terrazzo.report.page import page
from terrazzo.report.reading import Reading, newest
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show
from terrazzo.report.trace import trace_json

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo report
      the latest run in runs/
  terrazzo report runs/20260131-142530-train
      that one: a summary here, and report.html in its folder
  terrazzo report runs/20260131-142530-train --trace trace.json
      also a trace for chrome://tracing or Perfetto

The page needs no network and opens from disk. A run that was cut off is reported as far as it got.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="show a recorded run in the terminal and as a page",
        description="Show what a run recorded: plan, losses, memory, traffic, time, timeline.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="a run folder (default: the latest)"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="where the page goes (default: in the folder)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a trace as JSON")
    parser.set_defaults(command=report)


def report(options: argparse.Namespace) -> int:
    reading = Reading.open(options.folder or newest(Path("runs")))
    screen = Screen()
    show(reading, screen)
    screen.line()
    target = options.html or reading.path / "report.html"
    save(target, page(reading))
    screen.line(f"page: {target}")
    if options.trace is not None:
        save(options.trace, trace_json(reading.events, title=reading.title))
        screen.line(f"trace: {options.trace}")
    return 0


def save(path: Path, text: str) -> None:
    """Writes a file, or says in one line why not."""
    try:
        document.write(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another place") from error

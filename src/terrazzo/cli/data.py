"""``terrazzo data``: how fast storage is, small files packed, where a training waits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from terrazzo.cli.stalls import add_stalls
from terrazzo.cli.verb import add_verb
from terrazzo.errors import UsageError
from terrazzo.feed.packing import SHARD_BYTES, Packed, pack
from terrazzo.measure.storage import measure_storage
from terrazzo.records.storage import Reads, Storage
from terrazzo.records.units import bytes_text, count_text, parse_bytes, seconds_text
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

BUDGET_S, MOST = 8.0, "256MiB"
EXAMPLES = """\
examples:
  terrazzo data storage data/
      how fast the medium under this folder is read, in one piece and here and there
  terrazzo data pack data/train shards/train --shard-size 128MiB
      small files as a few large ones, which slow media read many times as fast
  terrazzo data stalls train.py
      of each step of your script, what is computing and what is waiting for input
"""
STORAGE_EXAMPLES = """\
examples:
  terrazzo data storage data/
  terrazzo data storage /media/card --seconds 20 --most 1GiB --save card.json

Reads what lies there, past the system's page cache; where there are no large files, a scratch file
of up to 64 MiB is written and removed again. It ends when seconds or bytes are spent.
"""
PACK_EXAMPLES = """\
examples:
  terrazzo data pack data/train shards/train
  terrazzo data pack data/train shards/train --shard-size 128MiB --only jpg,json
  terrazzo data pack data/ shards/ --by-name --only jpg,png
      pictures/017.jpg and masks/017.png become one sample, 017

Shards are tar files as webdataset reads them; terrazzo.feed.shards.ShardSet reads them as a data
set of PyTorch. A sample is files with one name up to the first dot. Every shard is read back and
compared by hash before it gets its name. The source is never changed. Stopped in the middle, the
same command goes on where it was.
"""


def add_to(commands: Commands) -> None:
    parser = add_verb(commands, "data", "storage and input: measure, pack, find stalls", EXAMPLES)
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    measured = add_verb(below, "storage", "measure how fast a medium is read", STORAGE_EXAMPLES)
    measured.add_argument("path", type=Path, metavar="DIR", help="a folder or file on the medium")
    measured.add_argument(
        "--seconds", type=float, default=BUDGET_S, metavar="S",
        help="most that it may take (default: %(default)g)",
    )  # fmt: skip
    measured.add_argument(
        "--most", default=MOST, metavar="BYTES", help="most that is read (default: %(default)s)"
    )
    measured.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    measured.set_defaults(command=storage)
    packed = add_verb(below, "pack", "pack small files into shards", PACK_EXAMPLES)
    packed.add_argument("source", type=Path, metavar="DIR", help="the folder to pack")
    packed.add_argument("target", type=Path, metavar="FOLDER", help="where the shards go")
    packed.add_argument(
        "--shard-size", default=f"{SHARD_BYTES >> 20}MiB", metavar="BYTES",
        help="most that a shard holds (default: %(default)s)",
    )  # fmt: skip
    packed.add_argument(
        "--only", default="", metavar="FIELDS", help="these alone, such as jpg,json"
    )
    packed.add_argument(
        "--by-name", action="store_true", help="files of one name in several folders are one sample"
    )
    packed.set_defaults(command=pack_folder)
    add_stalls(below)


@contextmanager
def _progress(what: str) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on the error stream of a terminal; elsewhere nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield bar, bar.add_task(what, total=1.0)


# ---- storage --------------------------------------------------------------------------------


def storage(options: argparse.Namespace) -> int:
    if not 0 < options.seconds < 3600:
        raise UsageError(f"--seconds {options.seconds:g} must be above 0 and below 3600")
    most = parse_bytes(options.most)
    with _progress("storage") as (bar, task):
        found = measure_storage(
            options.path,
            budget_s=options.seconds,
            most_bytes=most,
            tell=lambda what, share: bar.update(task, description=what, completed=share),
        )
    show_storage(found, Screen())
    if options.save is not None:
        found.save(options.save)
        print(f"saved as {options.save}")
    return 0


def show_storage(found: Storage, screen: Screen) -> None:
    screen.line(f"{found.path}: {found.medium}", "bold")
    screen.line(
        f"{found.method}; {bytes_text(found.read_bytes)} read in {seconds_text(found.took_s)}",
        "dim",
    )
    screen.raw(f"{'in one piece':<34}{rate_text(found.sequential_bytes_per_s):>24}")
    for row in found.random:
        what = f"{bytes_text(row.size_bytes)} at random"
        screen.raw(_row(f"{what}, {count_text(row.readers, 'reader')}", row))
    if found.files is not None:
        screen.raw(_row(f"whole files, {bytes_text(found.files.size_bytes)} each", found.files))
        screen.line(_advice(found, found.files))


def _row(what: str, row: Reads) -> str:
    return f"{what:<34}{rate_text(row.bytes_per_s):>12}{seconds_text(row.each_s):>12} each"


def _advice(found: Storage, files: Reads) -> str:
    """What packing would do for whole files of this size, read in any order."""
    packed_s = found.read_s(files.size_bytes)
    times = files.each_s / packed_s
    if times < 1.2:
        return "Packed into shards they would be read about as fast as they are."
    return (
        f"Packed into shards (terrazzo data pack) one would take about {seconds_text(packed_s)}: "
        f"{times:.1f} times as fast."
    )


def rate_text(bytes_per_s: float) -> str:
    """Media are sold in powers of ten."""
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.3g} GB/s"


# ---- pack -----------------------------------------------------------------------------------


def pack_folder(options: argparse.Namespace) -> int:
    shard_bytes = parse_bytes(options.shard_size)
    only = tuple(field for field in options.only.split(",") if field)
    with _progress("packing") as (bar, task):
        found = pack(
            options.source,
            options.target,
            shard_bytes=shard_bytes,
            only=only,
            by_name=options.by_name,
            tell=lambda done, total: bar.update(task, completed=done / max(total, 1)),
        )
    print(_packed_text(found, options.target))
    return 0


def _packed_text(found: Packed, target: Path) -> str:
    shards = found.shards
    kept = f", {found.kept} of them were there already" if found.kept else ""
    return (
        f"{count_text(shards.samples, 'sample')} in {count_text(len(shards.names), 'shard')}"
        f"{kept}, {bytes_text(shards.size_bytes)} in {target}, all checked by hash. "
        f'Read them with terrazzo.feed.shards.ShardSet("{target}").'
    )

"""A set of pictures in a folder: whole or absent, never half of one.

    folder/labels.json           what the set is, and one entry for each picture
    folder/pictures/000000.jpg
    folder/masks/000000.png      where there are masks

A set is written beside its folder and moved there when it is complete, labels and all.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.records import document

KIND, VERSION = "pictures", 1
LABELS = "labels.json"


@dataclass(frozen=True)
class Recipe:
    """All that decides the bits of a set."""

    task: str
    count: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"a set of {self.count} pictures: give a count of 1 or more")
        if self.size < 16:
            raise UsageError(f"pictures of {self.size} pixels: give a size of 16 or more")

    def __str__(self) -> str:
        return f"{self.count} {self.task} pictures of {self.size} pixels, seed {self.seed}"


Entry = dict[str, Any]
"""A picture's labels: "picture" and perhaps "mask" are files, "bytes" the sizes of both."""
Writer = Callable[[Path], list[Entry]]


def read(folder: Path) -> tuple[Recipe, list[Entry]]:
    """The recipe and the entries of a set."""
    try:
        text = (folder / LABELS).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"no pictures in {folder}: {LABELS} is missing there") from error
    body = document.parse(text, KIND, VERSION)
    return Recipe(**body["recipe"]), body["entries"]


def ensure(folder: Path, recipe: Recipe, write: Writer) -> Path:
    """Makes a set unless it is there already; another set is never overwritten."""
    folder = Path(folder)
    if _holds(folder, recipe):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        entries = write(fresh)
        body = {"recipe": asdict(recipe), "entries": entries}
        (fresh / LABELS).write_text(document.dump(KIND, VERSION, body), encoding="utf-8")
        fresh.chmod(0o755)  # mkdtemp's folders are private
        _move(fresh, folder, recipe)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _move(fresh: Path, folder: Path, recipe: Recipe) -> None:
    """Puts a finished set in place; another process may have been faster."""
    if folder.is_dir() and not _holds(folder, recipe):
        _discard(folder)
    with contextlib.suppress(OSError):
        fresh.rename(folder)
        return
    if not _holds(folder, recipe):
        raise UsageError(f"cannot put {recipe} into {folder}: give a folder that can be written")


def _discard(folder: Path) -> None:
    """Removes what ``_holds`` found damaged, in one move: readers see all of it or nothing."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside / "damaged")
    shutil.rmtree(aside, ignore_errors=True)


def _holds(folder: Path, recipe: Recipe) -> bool:
    """Whether this very set is there; False: nothing is, or a damaged copy that may go."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / LABELS).is_file():
        raise UsageError(
            f"{folder} holds something that is not a set of pictures ({LABELS} is missing): "
            "give another folder"
        )
    try:
        found, entries = read(folder)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / LABELS} cannot be read: give another folder") from error
    if found != recipe:
        raise UsageError(f"{folder} holds {found}, not {recipe}: give another folder")
    return all(_is_whole(folder, entry) for entry in entries)


def _is_whole(folder: Path, entry: Entry) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size in entry["bytes"].items())
    except OSError:
        return False

"""Files of the kernel: each write is read back, because a limit that was not taken is no limit."""

from __future__ import annotations

import os
from pathlib import Path

from terrazzo.errors import LabError


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error


def table(path: Path) -> dict[str, int]:
    """A file of lines such as ``nr_throttled 12``."""
    rows = (line.split() for line in read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def write(path: Path, text: str) -> None:
    """Writes what can't be read back, such as a process into a group."""
    try:
        number = os.open(path, os.O_WRONLY)  # the kernel's files are neither made nor cut short
        try:
            os.write(number, text.encode("ascii"))  # in one piece, as the kernel takes it
        finally:
            os.close(number)
    except OSError as error:
        raise LabError(
            f"the kernel refused {text!r} for {path}: {error.strerror}; without it the device "
            "would not be what it claims to be"
        ) from error


def set_to(path: Path, text: str, *, seen_as: str | None = None) -> None:
    """Writes a setting and makes sure that the kernel holds it."""
    write(path, text)
    seen, expected = read(path), text if seen_as is None else seen_as
    if seen.split() != expected.split():
        raise LabError(f"{path} holds {seen!r} after {text!r} was written, not {expected!r}")

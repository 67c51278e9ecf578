"""Storage: how fast a medium is read, in one piece and here and there, past the system's cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.records import document

KIND, VERSION = "storage", 1
DIRECT = "direct I/O, past the page cache"
ADVISED = "page cache dropped before every read (posix_fadvise)"
MEMORY = "memory: nothing here is read from a medium"


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of one size at random places, by so many readers at once."""

    size_bytes: int
    readers: int
    each_s: float
    """From one read's beginning to its end, on average."""
    count: int

    @property
    def per_s(self) -> float:
        """Reads a second, of all readers together."""
        return self.readers / self.each_s

    @property
    def bytes_per_s(self) -> float:
        return self.per_s * self.size_bytes


@dataclass(frozen=True, slots=True)
class Storage:
    """What reading from the medium under a path costs."""

    path: str
    medium: str
    """Disk and file system, in words."""
    method: str
    sequential_bytes_per_s: float
    random: tuple[Reads, ...]
    files: Reads | None
    """Small files that lie there, opened and read one by one; None: there were none to try."""
    read_bytes: int
    took_s: float
    measured_s: float
    """When, in seconds since the epoch."""

    def read_s(self, size_bytes: float, *, readers: int = 1) -> float:
        """Seconds of one read at a random place, with ``readers`` (a count that was tried) at it.

        Measured sizes are joined by straight lines.
        """
        rows = sorted((row.size_bytes, row.each_s) for row in self.random if row.readers == readers)
        return _along(rows, size_bytes)

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Storage:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            rest = {
                key: value
                for key, value in body.items()
                if key not in ("terrazzo", "version", "random", "files")
            }
            return cls(
                random=tuple(_reads(row) for row in body["random"]),
                files=None if body["files"] is None else _reads(body["files"]),
                **rest,
            )

    def save(self, path: Path) -> None:
        try:
            document.write(path, self.to_json() + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}; name another place"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Storage:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"storage record {path} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _reads(row: Mapping[str, Any]) -> Reads:
    return Reads(**row)


def _along(rows: list[tuple[int, float]], size_bytes: float) -> float:
    """Between measured sizes, and beyond them along the outermost line; never below the first."""
    if len(rows) == 1 or size_bytes <= rows[0][0]:
        return rows[0][1]
    pairs = list(pairwise(rows))
    low, high = next((pair for pair in pairs if size_bytes <= pair[1][0]), pairs[-1])
    slope = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
    return low[1] + slope * (size_bytes - low[0])

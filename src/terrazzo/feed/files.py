"""Files: what a sample opens for reading, watched, timed, and given from memory where it is held.

A data set is a black box that opens files by itself. In a worker, ``open`` is replaced by one that
reads a file at once and knows how long that took, so that fetching is told from decoding, an error
can name its file, and the bytes of a sample can be kept without knowing its format. What several
samples open (an archive, a table) belongs to none of them and is read as ever.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrazzo.errors import DataError
from terrazzo.feed.large import Large
from terrazzo.feed.stamps import Stamps, changed

MOST_BYTES = 64 << 20
"""A larger file is an archive that samples are read from, and is left alone."""
SMALL_BYTES = 1 << 20
"""A file of this size or less is read at once."""
MOST_NAMES = 1 << 14
"""Of so many files it is known who opened them first."""


Stamp = tuple[str, int]
"""A file, and when it was changed last, in nanoseconds."""
Opened = tuple[str, int, bytes]


class Copy(io.BytesIO):
    """A file that lies in memory and still has a name; its number is that of the real one."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name
        self._real: Any = None

    def fileno(self) -> int:
        if self._real is None:
            self._real = _open(self.name, "rb", buffering=0)
        number: int = self._real.fileno()
        return number

    def close(self) -> None:
        if self._real is not None:
            self._real.close()
        super().close()


_open = io.open


class Names:
    """Only the name of the file that was opened last, where nothing is held and nothing timed."""

    def __init__(self, stamps: Stamps | None = None) -> None:
        """Without ``stamps`` files may change as they like."""
        self.last, self.stamps = "", stamps
        self.thread = threading.get_ident()

    def open(self, file: Any, *rest: Any, **options: Any) -> Any:
        """Instead of ``open``."""
        path = _path(file)
        if path is None or threading.get_ident() != self.thread:
            return _open(file, *rest, **options)
        self.last = path
        found = _open(file, *rest, **options)
        return _noted(self.stamps, found, path, rest[0] if rest else options.get("mode", "r"))


class Files:
    """The files of the sample that is being made."""

    def __init__(self, stamps: Stamps | None = None) -> None:
        """Without ``stamps`` files may change as they like, as long as they are not held."""
        self.last, self.stamped = "", stamps
        self.read_s = self.cpu_s = 0.0
        self.read_bytes = 0
        self.fetched: Any = None
        """What the data set itself has fetched, if that is a step of its own."""
        self.stamps: list[Stamp] = []
        """The files that a sample was made of, as they were."""
        self._opened: list[Opened] = []
        self._large: list[Large] = []
        self._is_partly_seen = False
        self._sample: Any = None
        self._first: dict[int, Any] = {}
        """Who was the first to open a file, by a number for its name."""
        self._held: dict[str, Opened] = {}
        self._is_timed = False
        self.thread = threading.get_ident()
        """Others may open files meanwhile, which are none of the sample's."""

    @property
    def opened(self) -> list[Opened]:
        """What was read from storage, whole, and is this sample's own, in order."""
        for large in self._large:
            data = large.whole
            if data is None:
                self._is_partly_seen = True
            else:
                self._opened.append((large.name, large.changed_ns, data))
            large.release()
        self._large = []
        return self._opened

    @property
    def whole(self) -> Any:
        """All that a sample is made of, None: that is not known."""
        if self.fetched is not None:
            return self.fetched
        opened = self.opened
        return opened if opened and not self._is_partly_seen else None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What happens within is fetching."""
        if self._is_timed:
            yield
            return
        self._is_timed = True
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.read_s += time.perf_counter() - began
            self.cpu_s += time.thread_time() - cpu
            self._is_timed = False

    def begin(self, sample: Any, held: list[Opened] | None = None) -> None:
        for large in self._large:
            large.release()
        self._opened, self._large, self.stamps = [], [], []
        self._is_partly_seen = False
        self.last, self.fetched, self._sample = "", None, sample
        self._held = {one[0]: one for one in held or ()}

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any
    ) -> Any:
        """Stands where ``open`` was."""
        path, asked = _path(file), [*rest, *options.values()]
        is_plain = mode == "rb" and all(one in (None, True) for one in asked)
        if path is None or threading.get_ident() != self.thread:
            return _open(file, mode, buffering, *rest, **options)
        self.last = path
        if not is_plain:
            found = _noted(self.stamped, _open(file, mode, buffering, *rest, **options), path, mode)
            if _reads(mode):
                self.stamps.append((path, os.fstat(found.fileno()).st_mtime_ns))
            return found
        held = self._held.get(path)
        if held is not None and self._is_still(held):
            return Copy(held[2], path)
        with self.timed():
            found = _noted(self.stamped, _open(path, "rb", buffering), path, mode)
            facts = os.fstat(found.fileno())
            self.stamps.append((path, facts.st_mtime_ns))
            if self._is_shared(path):
                return found
            if facts.st_size > MOST_BYTES or not stat.S_ISREG(facts.st_mode):
                self._is_partly_seen = True
                return found
            if facts.st_size <= SMALL_BYTES:
                with found:
                    data = found.read()
                self.read_bytes += len(data)
                self._opened.append((path, facts.st_mtime_ns, data))
                return Copy(data, path)
        found.close()
        large = Large(io.FileIO(path), self.timed, self._count)
        self._large.append(large)
        return io.BufferedReader(large) if buffering else large

    def _is_still(self, held: Opened) -> bool:
        """Whether a file is what is held of it; False: it was changed on purpose."""
        path, changed_ns, _ = held
        try:
            facts = Path(path).stat()
        except OSError:  # one that is gone is still held
            return True
        is_known = self.stamped is not None and self.stamped.note(path, facts)
        if facts.st_mtime_ns != changed_ns and not is_known:
            raise changed(path)
        return facts.st_mtime_ns == changed_ns

    def _count(self, read_bytes: int) -> None:
        self.read_bytes += read_bytes

    def _is_shared(self, path: str) -> bool:
        """Whether other samples have opened it, too: then it is no part of any one of them."""
        if len(self._first) >= MOST_NAMES:
            self._first.clear()
        first: Any = self._first.setdefault(hash(path), self._sample)
        return bool(first != self._sample)


def check(stamps: Sequence[Stamp]) -> None:
    """Refuses what is held of a file that has changed since; one that is gone is still held."""
    for path, changed_ns in stamps:
        try:
            now = Path(path).stat().st_mtime_ns
        except OSError:
            continue
        if now != changed_ns:
            raise changed(path)


def _reads(mode: str) -> bool:
    return "r" in mode and "+" not in mode


def _noted(stamps: Stamps | None, found: Any, path: str, mode: str) -> Any:
    """A file that was just opened; what a data set writes itself is not looked at."""
    if stamps is None:
        return found
    if not _reads(mode):
        stamps.leave(path)
        return found
    try:
        stamps.note(path, os.fstat(found.fileno()))
    except DataError:
        found.close()
        raise
    return found


def _path(file: Any) -> str | None:
    """The path as text; a number of an open file has none."""
    if isinstance(file, (str, bytes)) or hasattr(file, "__fspath__"):
        return os.fsdecode(file)
    return None


@contextmanager
def watched(files: Files | Names) -> Iterator[None]:
    """Within, this process opens files through ``files``."""
    before: tuple[Callable[..., Any], Callable[..., Any]] = builtins.open, io.open
    files.thread = threading.get_ident()
    builtins.open = io.open = files.open
    try:
        yield
    finally:
        builtins.open, io.open = before

"""Storage measured: reads in one piece and at random places, bounded in bytes and seconds.

Every read must come from the medium, not from memory. Direct I/O does that; where a file system
has none, the kernel is told before every read to drop the pages (which it does for pages that are
clean). What the drive itself keeps in its own cache nobody here can drop.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.measure.medium import Medium, medium_of
from terrazzo.records.storage import ADVISED, DIRECT, MEMORY, Reads, Storage

Tell = Callable[[str, float], None]
"""Hears what is being done, and how much of all is done (0 to 1)."""

BLOCK_BYTES = 4 << 20
ALIGNED = 4096
SIZES = (4 << 10, 64 << 10, 512 << 10)
READERS = (1, 4, 8)
LEAST_BYTES = 8 << 20
"""Fewer bytes of files are no ground to measure on: a scratch file is written instead."""
SCRATCH_BYTES = 64 << 20
MOST_FILES = 4096
SEQUENTIAL_SHARE, FILES_SHARE = 0.3, 0.15
"""Of time and bytes; the rest is for reads at random places."""


def measure_storage(
    path: Path,
    *,
    budget_s: float = 8.0,
    most_bytes: int = 256 << 20,
    tell: Tell = lambda what, share: None,
) -> Storage:
    """Measures the medium under a file or folder on what lies there, or on a scratch file."""
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}: name one on the medium to measure")
    medium, began_s = medium_of(path), time.perf_counter()
    tell("looking for files to read", 0.0)
    found = list(_files(path))
    with ExitStack() as cleanup:
        large = [file for file in found if file.stat().st_size >= max(SIZES)]
        if sum(file.stat().st_size for file in large) < LEAST_BYTES:
            tell("writing a scratch file", 0.0)
            folder = path if path.is_dir() else path.parent
            large = [cleanup.enter_context(_scratch(folder, min(SCRATCH_BYTES, most_bytes)))]
        ground = cleanup.enter_context(_Ground.open(large, medium))
        spent = _Budget(budget_s, most_bytes)
        sequential = _sequential(ground, spent.part(SEQUENTIAL_SHARE), tell)
        rows = _random(ground, spent, tell)
        small = [file for file in found if file.stat().st_size < max(SIZES)]
        files = _whole_files(small, spent.part(FILES_SHARE), tell)
    return Storage(
        path=str(path),
        medium=medium.title,
        method=ground.method,
        sequential_bytes_per_s=sequential,
        random=rows,
        files=files,
        read_bytes=spent.read_bytes,
        took_s=time.perf_counter() - began_s,
        measured_s=time.time(),
    )


class _Budget:
    """Seconds and bytes of the whole measurement; a part ends when either of its own is spent."""

    def __init__(self, seconds: float, most_bytes: int) -> None:
        self.seconds, self.most_bytes, self.read_bytes = seconds, most_bytes, 0

    def part(self, share: float) -> _Part:
        return _Part(self, time.perf_counter() + share * self.seconds, share * self.most_bytes)


class _Part:
    def __init__(self, budget: _Budget, end_s: float, left_bytes: float) -> None:
        self.budget, self.end_s, self.left_bytes = budget, end_s, left_bytes

    def spend(self, count_bytes: int) -> bool:
        """Whether there is more to spend after these bytes."""
        self.budget.read_bytes += count_bytes
        self.left_bytes -= count_bytes
        return self.left_bytes > 0 and time.perf_counter() < self.end_s


class _Ground:
    """Open files, read as if nothing of them were in memory."""

    def __init__(self, files: Sequence[tuple[int, int]], method: str) -> None:
        self.files, self.method = files, method

    @classmethod
    @contextmanager
    def open(cls, paths: Sequence[Path], medium: Medium) -> Iterator[_Ground]:
        method = MEMORY if medium.is_memory else DIRECT
        opened: list[tuple[int, int]] = []
        try:
            for path in paths[:64]:
                number, method = _opened(path, method)
                opened.append((number, path.stat().st_size))
            yield cls(opened, method)
        finally:
            for number, _ in opened:
                os.close(number)

    def read(self, number: int, offset: int, buffer: memoryview) -> int:
        if self.method == ADVISED:
            os.posix_fadvise(number, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        return os.preadv(number, [buffer], offset)

    def place(self, draw: random.Random, size: int) -> tuple[int, int]:
        """A file and an aligned offset in it from which so many bytes can be read."""
        number, length = draw.choice(self.files)
        return number, draw.randrange(0, max(length - size, 0) // ALIGNED + 1) * ALIGNED


def _opened(path: Path, method: str) -> tuple[int, str]:
    try:
        if method == DIRECT:
            with suppress(OSError):  # not every file system has it
                return os.open(path, os.O_RDONLY | os.O_DIRECT), DIRECT
            method = ADVISED
        number = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; allow it, or name others"
        ) from (error)
    with suppress(OSError):
        os.fdatasync(number)  # pages that are not written yet are not dropped
    return number, method


def _buffer(size: int) -> memoryview:
    """Memory that begins where a page does, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, size))


def _sequential(ground: _Ground, part: _Part, tell: Tell) -> float:
    """Bytes a second of the largest file, from its beginning."""
    tell("reading in one piece", 0.0)
    number, length = max(ground.files, key=lambda file: file[1])
    size = min(BLOCK_BYTES, length // ALIGNED * ALIGNED)
    buffer, read, offset = _buffer(size), 0, 0
    begin_s = time.perf_counter()
    while True:
        got = ground.read(number, offset, buffer)
        read, offset = read + got, offset + size
        if not part.spend(got):
            break
        if offset + size > length:
            offset = 0
    return read / (time.perf_counter() - begin_s)


def _random(ground: _Ground, budget: _Budget, tell: Tell) -> tuple[Reads, ...]:
    cases = [(size, readers) for readers in READERS for size in SIZES]
    share = (1 - SEQUENTIAL_SHARE - FILES_SHARE) / len(cases)
    rows = []
    for number, (size, readers) in enumerate(cases):
        tell(f"reading {size >> 10} KiB here and there", SEQUENTIAL_SHARE + number * share)
        rows.append(_reads(ground, size, readers=readers, part=budget.part(share)))
    return tuple(rows)


def _reads(ground: _Ground, size: int, *, readers: int, part: _Part) -> Reads:
    def work(seed: int) -> tuple[int, float]:
        draw, buffer, count = random.Random(seed), _buffer(size), 0
        begin_s, more = time.perf_counter(), True
        while more:
            number, offset = ground.place(draw, size)
            more = part.spend(ground.read(number, offset, buffer))
            count += 1
        return count, time.perf_counter() - begin_s

    with ThreadPoolExecutor(readers) as pool:
        found = list(pool.map(work, range(readers)))
    count, seconds = sum(count for count, _ in found), sum(seconds for _, seconds in found)
    return Reads(size, readers, seconds / count, count)


def _whole_files(paths: Sequence[Path], part: _Part, tell: Tell) -> Reads | None:
    """Files as a data set reads them: opened, read, closed; their names stay in memory."""
    if not paths:
        return None
    tell("reading whole files", 1 - FILES_SHARE)
    draw = random.Random(len(paths))
    chosen, count, read, took_s = draw.sample(paths, len(paths)), 0, 0, 0.0
    for path in chosen:
        evict(path)
        begin_s = time.perf_counter()
        try:
            data = path.read_bytes()
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}; allow it, or name another folder"
            raise UsageError(text) from error
        took_s += time.perf_counter() - begin_s
        count, read = count + 1, read + len(data)
        if not part.spend(len(data)):
            break
    return Reads(read // count, 1, took_s / count, count)


def evict(path: Path) -> None:
    """Drops what the system keeps of a file in memory, as far as it does so."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def _files(path: Path) -> Iterator[Path]:
    """Some thousands of files under a path, none of them empty."""
    if path.is_file():
        yield path
        return
    count = 0
    for folder, below, names in os.walk(path):
        below.sort()
        for name in sorted(names):
            file = Path(folder) / name
            with suppress(OSError):
                if file.is_file() and file.stat().st_size:
                    yield file
                    count += 1
            if count >= MOST_FILES:
                return


@contextmanager
def _scratch(folder: Path, size: int) -> Iterator[Path]:
    """A file of noise that goes away again; it takes at most half of what is free."""
    free = shutil.disk_usage(folder).free
    if free < 4 * LEAST_BYTES:
        raise UsageError(
            f"{folder} has {free >> 20} MiB free and no large files to read: a scratch file needs "
            f"{4 * LEAST_BYTES >> 20} MiB of room; name a folder with files or with room"
        )
    try:
        number, name = tempfile.mkstemp(prefix=".terrazzo-storage-", dir=folder)
    except OSError as error:
        raise UsageError(
            f"{folder} holds no large files, and a scratch file cannot be written there: "
            f"{error.strerror}; name a folder with data, or one to write in"
        ) from error
    try:
        with os.fdopen(number, "wb") as file:
            begin_s = time.perf_counter()
            for _ in range(0, min(size, free // 2), BLOCK_BYTES):
                file.write(os.urandom(BLOCK_BYTES))
                file.flush()
                os.fdatasync(file.fileno())
                if file.tell() >= LEAST_BYTES and time.perf_counter() - begin_s > 4.0:
                    break  # a slow card: less will do
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)

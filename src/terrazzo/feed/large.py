"""Large: a file that is read as it is asked for, and known whole only if all of it was.

Out of a large file a sample may need a few bytes; to read it at once, as small ones are, might read
the whole data set for each of its samples.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Large(io.RawIOBase):
    """Between a file and who reads it."""

    def __init__(
        self,
        real: io.FileIO,
        timed: Callable[[], AbstractContextManager[None]],
        count: Callable[[int], None],
    ) -> None:
        """``timed``: around all reading; ``count`` is told how many bytes that were."""
        self.real, self.name, self.mode = real, real.name, "rb"
        facts = os.fstat(real.fileno())
        self.size, self.changed_ns = facts.st_size, facts.st_mtime_ns
        self._timed, self._count = timed, count
        self._is_noted = True
        self._data = bytearray()
        self._spans: list[tuple[int, int]] = []

    @property
    def whole(self) -> bytes | None:
        """All of it, if all of it was read."""
        end = 0
        for begin, stop in sorted(self._spans):
            if begin > end:
                return None
            end = max(end, stop)
        return bytes(self._data) if end >= self.size else None

    def release(self) -> None:
        """Whose sample it was is done, though the file may be kept open."""
        self._is_noted = False
        self._data, self._spans = bytearray(), []

    def _note(self, at: int, data: Any) -> None:
        count = len(data)
        self._count(count)
        if not self._is_noted:
            return
        if len(self._data) < at + count:
            self._data.extend(bytes(at + count - len(self._data)))
        self._data[at : at + count] = data
        end = at + count
        if self._spans and self._spans[-1][1] == at:
            at = self._spans.pop()[0]
        self._spans.append((at, end))

    def readinto(self, buffer: Any) -> int:
        at = self.real.tell()
        with self._timed():
            count = self.real.readinto(buffer) or 0
        self._note(at, memoryview(buffer).cast("B")[:count])
        return count

    def readall(self) -> bytes:
        at = self.real.tell()
        with self._timed():
            data = self.real.readall()
        self._note(at, data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.real.seek(offset, whence)

    def tell(self) -> int:
        return self.real.tell()

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()
        super().close()

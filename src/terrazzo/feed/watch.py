"""A watch over the files that are opened: they are dropped from the page cache in that moment.

So no list of a data set's files is needed: Python tells of every file it opens (an audit hook).
Libraries that open files without Python are not seen, and their files stay as warm as they are.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

NOT_DATA = (".py", ".pyc", ".so", ".pth")
NOT_FOLDERS = ("/proc/", "/sys/", "/dev/")


class Watch:
    """Hears of every file this process, and those it forks, open for reading."""

    def __init__(self, *, evicts: bool, own: Path) -> None:
        """``own``: a folder whose files are no data, but notes about the run."""
        self.evicts, self.folder = evicts, ""
        self._not_data = (*NOT_FOLDERS, sys.prefix, sys.base_prefix, f"{own.absolute()}{os.sep}")
        self._busy = threading.local()
        self.has_begun = False

    def begin(self) -> None:
        """From now on; there is no end to it but that of the process."""
        if self.has_begun:
            return
        self.has_begun = True
        if self.evicts:
            for link in Path("/proc/self/fd").iterdir():  # what is open already
                with suppress(OSError):
                    self._drop(str(link.readlink()))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or getattr(self._busy, "now", False):
            return
        path, _, flags = arguments
        reads = not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY
        if isinstance(path, (str, bytes)) and reads:
            self._busy.now = True
            try:
                self._drop(os.fsdecode(path))
            finally:
                self._busy.now = False

    def _drop(self, path: str) -> None:
        full = str(Path(path).absolute())
        if full.endswith(NOT_DATA) or full.startswith(self._not_data):
            return
        with suppress(OSError):
            number = os.open(full, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(number).st_mode):
                    self.folder = str(Path(full).parent)
                    if self.evicts:
                        os.fdatasync(number)  # what is not written yet would stay
                        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)

"""Stamps: what files were when they were first read, in a table that all workers share.

A file that is another one in a later epoch must not go unnoticed, whoever opens it then, and
whether or not anything is held. Names of millions of files would fill a small board, so a file is
eight bytes here: 40 bits that stand for its name and 24 for its size and the time of its last
change. A word is written at once, so workers need no lock: of two that want one place, the loser's
file is noted the next time.
"""

from __future__ import annotations

import mmap
import os
import stat
from hashlib import blake2b

from terrazzo.errors import DataError
from terrazzo.feed.watch import NOT_DATA, NOT_FOLDERS

WORD_BYTES = 8
MARK_BITS = 24
MARK = (1 << MARK_BITS) - 1
TAG = (1 << 64) - 1 - MARK
EACH = 2
"""Places for each sample."""
LEAST, MOST = 1 << 12, 1 << 23
"""Places of any set: 32 KiB to 64 MiB, of which memory is taken as files come."""
STREAM = 1 << 16
"""Places for a set that does not say how many samples it has."""
TRIES = 16
"""A file that finds so many places taken by others is not noted."""
MEANT = (
    "Train on a copy that stays as it is; if the change is meant, change an attribute of the data "
    "set, too, before the next epoch (dataset.version = 2), and its files are looked at anew"
)


def changed(path: str, remedy: str = MEANT) -> DataError:
    return DataError(
        f"{path} has changed since it was read first: the data set is another one now. {remedy}"
    )


class Stamps:
    """Of the files of one data set."""

    def __init__(self, samples: int | None = None) -> None:
        wanted = STREAM if samples is None else EACH * samples
        self.places = min(max(wanted, LEAST), MOST)
        self._words = self._none()
        self._like: int | None = None

    def _none(self) -> memoryview:
        return memoryview(mmap.mmap(-1, WORD_BYTES * self.places)).cast("Q")

    def note(self, path: str, facts: os.stat_result) -> bool:
        """Refuses a file that is not what it was; tells whether it will be known the next time."""
        if not stat.S_ISREG(facts.st_mode) or path.startswith(NOT_FOLDERS):
            return False
        if path.endswith(NOT_DATA):
            return False
        place, tag = self._find(path)
        if place is None:
            return False
        mark = hash((facts.st_size, facts.st_mtime_ns)) % MARK + 1
        word = self._words[place]
        if not word:
            self._words[place] = tag | mark
        elif word & MARK not in (0, mark):
            raise changed(path)
        return True

    def leave(self, path: str) -> None:
        """The data set writes this file itself: it may change as it likes."""
        place, tag = self._find(path)
        if place is not None:
            self._words[place] = tag

    def _find(self, path: str) -> tuple[int | None, int]:
        """Where a file is, or is to be; None: there is no place for it."""
        name = os.path.abspath(path) if path[:1] != os.sep else path  # noqa: PTH100
        code = blake2b(os.fsencode(name), digest_size=WORD_BYTES).digest()
        number = int.from_bytes(code, "little")
        tag = number & TAG | 1 << MARK_BITS  # never 0, which is nobody's
        first = (number & MARK) * self.places >> MARK_BITS
        for tried in range(first, first + TRIES):
            place = tried % self.places
            word = self._words[place]
            if not word or word & TAG == tag:
                return place, tag
        return None, tag

    # ---- a script that means to change its files ---------------------------------------------

    def begin(self, like: int) -> None:
        """With a data set that looks like this (``likeness``); another one may have other files.

        Workers that run go on with what was noted before, and are to be started anew.
        """
        if self._like not in (None, like):
            self._words = self._none()
        self._like = like

    def end(self, like: int) -> None:
        """What has changed by reading was not the script."""
        self._like = like

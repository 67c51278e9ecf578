"""Copies of a process, made by fork: they must not hold its connections open.

The others notice the end of a process when its connections end. A worker that was forked for
loading data or for exporting would keep them open, and its parent's death would look like silence.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def in_copies(close: Callable[[], None]) -> None:
    """Has a method called in every copy of this process, as long as its object is there."""
    known = weakref.WeakMethod(close)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)

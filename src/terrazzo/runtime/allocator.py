"""The C library's allocator: giving free memory back between the strips of passes.

Strips come and go by the megabyte. glibc keeps what they leave, in pieces too small for the next
whole map, so a process grows past what its tensors need. Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def trim() -> None:
    """Returns free pages to the system; costs next to nothing beside a pass over a map."""
    function = _malloc_trim()
    if function is not None:
        function(0)

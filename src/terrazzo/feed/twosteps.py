"""Two steps: a data set that says itself what is fetching a sample and what is decoding it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Get = TypeVar("Get", bound=Callable[..., Any])
MARK = "_terrazzo_two_steps"


def in_two_steps(get: Get) -> Get:
    """Promises of a ``__getitem__`` that it is ``self.decode(self.fetch(index))`` and no more.

    What ``fetch`` gives is then timed as fetching, and can be kept in memory, here or on other
    devices, whatever it was read from.
    """
    setattr(get, MARK, True)
    return get


def is_in_two_steps(dataset: Any) -> bool:
    """Asks the method itself: a subclass may have another one, with a transform in it."""
    return bool(getattr(type(dataset).__getitem__, MARK, False))

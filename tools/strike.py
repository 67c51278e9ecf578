"""A strike: something that happens in the middle of the work, at the n-th use of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def strike(target: Any, method: str, act: Callable[[], None], *, at: int) -> None:
    usual, count = getattr(target, method), 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            act()
        return usual(*args, **kwargs)

    setattr(target, method, struck)

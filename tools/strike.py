"""A strike: something that happens in the middle of the work, at the n-th use of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def strike(target: Any, methods: str, act: Callable[[], None], *, at: int) -> None:
    """At the n-th use of any of ``methods``, names with spaces between them."""
    count = 0

    def struck(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                act()
            return usual(*args, **kwargs)

        return call

    for method in methods.split():
        setattr(target, method, struck(getattr(target, method)))

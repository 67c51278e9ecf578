"""Sink: where the lines of devices go, and what the launcher itself has to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Sink(Protocol):
    """A printer, a live view, or a caller's own."""

    def line(self, device: int, text: str, *, is_error: bool = False) -> None: ...

    def notice(self, text: str) -> None: ...

    def mark(self, device: int, *, lost: bool) -> None:
        """The others go on without a device; or it is started again."""

    def add(self, name: str) -> None:
        """One more device, with the next number."""


class Callback:
    """A caller's function in place of the printer; it learns of failures from the result."""

    def __init__(self, output: Callable[[int, str], None]) -> None:
        self._output = output

    def line(self, device: int, text: str, *, is_error: bool = False) -> None:
        self._output(device, text)

    def notice(self, text: str) -> None:
        pass

    def mark(self, device: int, *, lost: bool) -> None:
        pass

    def add(self, name: str) -> None:
        pass

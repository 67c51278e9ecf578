"""Lines of several devices in one terminal or file, each under its device's name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
NOTICE = "terrazzo"


class Printer:
    """Writes ``device0 | line``: coloured in a terminal, plain in a pipe or file."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        out: IO[str] | None = None,
        err: IO[str] | None = None,
    ) -> None:
        self._names = list(names)
        self._width = max(len(name) for name in names)
        self._out = Console(file=out or sys.stdout, highlight=False)
        self._err = Console(file=err or sys.stderr, highlight=False)

    def line(self, device: int, text: str, *, is_error: bool = False) -> None:
        console = self._err if is_error else self._out
        name = self._names[device].ljust(self._width)
        self._write(console, name, text, style=COLOURS[device % len(COLOURS)])

    def notice(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write(self._err, NOTICE.ljust(self._width), text, style="bold")

    def mark(self, device: int, *, lost: bool) -> None:
        """Lines have told it."""

    def add(self, name: str) -> None:
        """One more device."""
        self._names.append(name)
        self._width = max(self._width, len(name))

    def _write(self, console: Console, name: str, text: str, *, style: str) -> None:
        if console.is_terminal:
            # from_ansi keeps the colours of the device's own output.
            styled = Text.assemble((f"{name} | ", style), Text.from_ansi(text))
            console.print(styled, soft_wrap=True)
        else:
            console.file.write(f"{name} | {text}\n")
            console.file.flush()

"""A board at the foot of the terminal: how each device is doing, below the lines they print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from terrazzo.cluster.printer import COLOURS, Printer
from terrazzo.report.live import LiveRun

REFRESH_PER_S = 2.0


class Board:
    """In a terminal the lines scroll above a table that is kept up to date; elsewhere only lines.

    Every line also goes to a file of its device in the run's folder.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, *, console: Console | None = None
    ) -> None:
        self._names, self._folder = list(names), folder
        self._console = console or Console(highlight=False)
        self._printer = Printer(names)
        self._run = LiveRun(folder, names)
        self._logs: list[IO[str] | None] = [
            _opened(folder / f"log-{device}.txt") for device in range(len(names))
        ]
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console,
                refresh_per_second=REFRESH_PER_S, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        for log in self._logs:
            if log is not None:
                log.close()

    def line(self, device: int, text: str, *, is_error: bool = False) -> None:
        log = self._logs[device]
        if log is not None:
            self._logs[device] = _written(log, text)
        if self._live is None:
            self._printer.line(device, text, is_error=is_error)
        else:
            style = COLOURS[device % len(COLOURS)]
            name = (f"{self._names[device]} | ", style)
            self._above(Text.assemble(name, Text.from_ansi(text)))

    def notice(self, text: str) -> None:
        if self._live is None:
            self._printer.notice(text)
        else:
            self._above(Text.assemble(("terrazzo | ", "bold"), text))

    def mark(self, device: int, *, lost: bool) -> None:
        self._run.devices[device].is_lost = lost

    def add(self, name: str) -> None:
        self._logs.append(_opened(self._folder / f"log-{len(self._names)}.txt"))
        self._names.append(name)
        self._printer.add(name)
        self._run.add(name)

    def _above(self, text: Text) -> None:
        assert self._live is not None
        self._live.console.print(text, soft_wrap=True)

    def _table(self) -> RenderableType:
        self._run.update()
        return self._run.table() if self._run.tells_something else Text()


def _opened(path: Path) -> IO[str] | None:
    try:
        return path.open("a", encoding="utf-8")
    except OSError:
        return None


def _written(log: IO[str], text: str) -> IO[str] | None:
    """The log, or None once the disk is full: what is printed matters more."""
    try:
        log.write(f"{text}\n")
        log.flush()
    except OSError:
        return None
    return log

"""Progress of the demo's trainings: moving bars in a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from terrazzo.records.units import loss_text, seconds_text
from terrazzo.report.screen import Screen

LINES = 10
"""How many lines a training prints where nothing can move."""

NARROW = 50
"""Columns below which the bar alone tells the step."""


class TrainingProgress:
    """Several trainings of the same number of steps, one after the other."""

    def __init__(self, screen: Screen, *, steps: int) -> None:
        self._screen, self._steps = screen, steps
        self._bars: Progress | None = None
        if screen.console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(None if screen.width > 60 else 8),
            ]
            words = TextColumn("{task.fields[told]}")
            self._bars = Progress(*columns, words, TimeElapsedColumn(), console=screen.console)

    def __enter__(self) -> TrainingProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars:
            self._bars.stop()

    def training(self, title: str) -> Callable[[int, str], None]:
        """A function for the lines of one training's devices; device 0 tells of its steps."""
        begin_s = time.monotonic()
        task: TaskID | None = None
        if self._bars:
            task = self._bars.add_task(title, total=self._steps, told="starting")
        else:
            self._screen.line(f"{title}: starting")

        def heard(device: int, line: str) -> None:
            told = _step(line) if device == 0 else None
            if told is None:
                return
            step, loss = told
            if self._bars and task is not None:
                words = f"loss {loss_text(loss)}"
                if self._screen.width >= NARROW:
                    words = f"step {step}, {words}"
                self._bars.update(task, completed=step, told=words)
            elif step % max(self._steps // LINES, 1) == 0 or step == self._steps:
                spent = seconds_text(time.monotonic() - begin_s)
                self._screen.line(
                    f"{title}: step {step} of {self._steps}, loss {loss_text(loss)}, {spent}"
                )

        return heard


def _step(line: str) -> tuple[int, float] | None:
    """The step that a line tells of; other lines are none of ours."""
    if not line.startswith('{"step"'):
        return None
    try:
        row = json.loads(line)
        return int(row["step"]), float(row["loss"])
    except (ValueError, KeyError, TypeError):
        return None

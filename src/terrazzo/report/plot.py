"""A plot made of characters: two curves, and where they lie on each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from terrazzo.report.ticks import ticks

BOTH, FIRST, SECOND = "●", "x", "○"


def plot(
    first: Mapping[int, float], second: Mapping[int, float], *, width: int, height: int = 10
) -> list[str]:
    """Rows of text; the loss goes up, steps go right.

    Columns hold the mean of their steps. A place that both curves reach is ``●``, one that only
    the first reaches is ``x``, only the second ``○``.
    """
    values = [v for curve in (first, second) for v in curve.values() if math.isfinite(v)]
    if not values:
        return []
    low, high = min(*values, 0.0), max(values)
    high = high if high > low else low + 1.0
    margin = 7
    columns = max(width - margin - 1, 8)
    steps = sorted({*first, *second})
    cells = [[" "] * columns for _ in range(height)]
    one, other = (_rows(curve, steps, columns, height, low, high) for curve in (first, second))
    for column in range(columns):
        mine, yours = one.get(column), other.get(column)
        if mine is not None:
            cells[mine][column] = BOTH if mine == yours else FIRST
        if yours is not None and yours != mine:
            cells[yours][column] = SECOND
    marks = {_row(value, height, low, high): f"{value:g}" for value in ticks(low, high, 4)}
    rows = [
        f"{marks.get(index, ''):>{margin - 2}} {'┤' if index in marks else '│'}{''.join(row)}"
        for index, row in enumerate(cells)
    ]
    rows.append(" " * (margin - 1) + "└" + "─" * columns)
    ends = f"step {steps[0]}", f"{steps[-1]}"
    rows.append(" " * margin + ends[0] + ends[1].rjust(columns - len(ends[0])))
    return [row.rstrip() for row in rows]


def _row(value: float, height: int, low: float, high: float) -> int:
    share = (value - low) / (high - low)
    return height - 1 - round(min(max(share, 0.0), 1.0) * (height - 1))


def _rows(
    curve: Mapping[int, float],
    steps: Sequence[int],
    columns: int,
    height: int,
    low: float,
    high: float,
) -> dict[int, int]:
    """The row of every column; between steps far apart the line goes straight."""
    places = {step: index for index, step in enumerate(steps)}
    last = max(len(steps) - 1, 1)
    found: dict[int, list[float]] = {}
    for step, value in curve.items():
        if math.isfinite(value):
            column = round(places[step] / last * (columns - 1))
            found.setdefault(column, []).append(value)
    means = {column: sum(values) / len(values) for column, values in sorted(found.items())}
    rows: dict[int, int] = {}
    previous: tuple[int, float] | None = None
    for column, mean in means.items():
        if previous is not None:
            start, from_ = previous
            for between in range(start + 1, column):
                share = (between - start) / (column - start)
                rows[between] = _row(from_ + share * (mean - from_), height, low, high)
        rows[column] = _row(mean, height, low, high)
        previous = column, mean
    return rows

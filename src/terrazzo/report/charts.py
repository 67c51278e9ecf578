"""Charts as markup that stretches: lines in a stretched SVG, words beside it in plain HTML.

Text inside a scaled SVG would shrink on a phone. So shapes are placed by percentages, and labels
are HTML placed by percentages too. Colours are classes: one hue per meaning, given in page.css.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrazzo.report.svg import Markup, percent, tag
from terrazzo.report.ticks import ticks

SCALE = 1000.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points (x, y); ``kind`` is its class in the page's style."""

    label: str
    kind: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of a chart along one direction, and the marks to write there."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """From 0 to 1 along the axis."""
        spread = self.high - self.low
        return (min(max(value, self.low), self.high) - self.low) / spread if spread else 0.5


def linear_axis(values: Sequence[float], *, from_zero: bool = False, most: int = 5) -> Axis:
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        high = low + 1.0
    marks = ticks(low, high, most)
    if from_zero and len(marks) > 1 and marks[-1] < high:  # end on a round number
        marks.append(round(2 * marks[-1] - marks[-2], 12))
        high = marks[-1]
    return Axis(low, high, [(mark, f"{mark:g}") for mark in marks])


def log_axis(low_power: int, high_power: int, every: int) -> Axis:
    """Marks at powers of ten; values are their logarithms."""
    marks = [(float(power), f"1e{power}") for power in range(low_power, high_power + 1, every)]
    return Axis(float(low_power), float(high_power), marks)


def line_chart(
    curves: Sequence[Curve],
    *,
    x: Axis,
    y: Axis,
    x_title: str,
    y_title: str,
    height: int = 220,
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Curves over common axes, each with a key that looks like its line."""
    shapes = [
        tag("line", x1=0, x2=SCALE, y1=_down(y, mark), y2=_down(y, mark), class_="grid")
        for mark, _ in y.marks
    ]
    words = []
    if limit is not None:
        at = _down(y, limit[0])
        shapes.append(tag("line", x1=0, x2=SCALE, y1=at, y2=at, class_="limit"))
        words.append(tag("span", limit[1], class_="note", style=f"top:{percent(at / SCALE)}"))
    shapes += [line for curve in curves for line in _lines(curve, x, y)]
    drawing = tag(
        "svg", *shapes, viewBox=f"0 0 {SCALE:g} {SCALE:g}", preserveAspectRatio="none",
        role="img", aria_label=f"{y_title} over {x_title}",
    )  # fmt: skip
    rows = [
        tag("span", text, style=f"top:{percent(_down(y, mark) / SCALE)}") for mark, text in y.marks
    ]
    columns = [tag("span", text, style=f"left:{percent(x.place(at))}") for at, text in x.marks]
    return tag(
        "div",
        tag("div", y_title, class_="ytitle"),
        _keys([(curve.kind, curve.label) for curve in curves]),
        tag("div", *rows, class_="yaxis"),
        tag("div", drawing, *words, class_="plot", style=f"height:{height}px"),
        tag("div", *columns, class_="xaxis"),
        tag("div", x_title, class_="xtitle"),
        class_="chart",
    )


def _down(axis: Axis, value: float) -> float:
    """From the top, as SVG counts."""
    return SCALE * (1 - axis.place(value))


def _lines(curve: Curve, x: Axis, y: Axis) -> list[Markup]:
    """One polyline per run of finite points: NaN leaves a gap, as it should."""
    runs: list[list[str]] = [[]]
    for at, value in curve.points:
        if math.isfinite(value):
            runs[-1].append(f"{SCALE * x.place(at):.1f},{_down(y, value):.1f}")
        elif runs[-1]:
            runs.append([])
    return [
        tag("polyline", points=" ".join(run * 2 if len(run) == 1 else run), class_=curve.kind)
        for run in runs
        if run
    ]


def _keys(rows: Sequence[tuple[str, str]]) -> Markup:
    keys = [tag("span", tag("i", class_=f"key {kind}"), label) for kind, label in rows]
    return tag("div", *keys, class_="keys")


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a label, its parts by kind in units of the scale, and what is written beside it."""

    label: str
    parts: Mapping[str, float]
    text: str


def bar_chart(bars: Sequence[Bar], *, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """Rows of stacked parts on one common scale, so that lengths compare."""
    top = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    rows = []
    for bar in bars:
        start, rects = 0.0, []
        for kind, size in bar.parts.items():
            if size > 0:
                at, wide = percent(start / top), percent(size / top)
                rects.append(tag("rect", x=at, width=wide, y=0, height="100%", class_=kind))
            start += size
        rows += [
            tag("div", bar.label, class_="name"),
            tag("svg", *rects, class_="bar", role="img", aria_label=f"{bar.label}: {bar.text}"),
            tag("div", bar.text, class_="value"),
        ]
    return tag(
        "div", _keys(keys) if keys else "", tag("div", *rows, class_="bars"), class_="barred"
    )

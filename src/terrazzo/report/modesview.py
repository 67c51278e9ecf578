"""Modes as a picture: time of a step against its energy, the front, the choice, what else is known.

The same spots are drawn with characters in a terminal and as a page that needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from terrazzo.records.power import joules_text, watts_text
from terrazzo.records.units import seconds_text
from terrazzo.report.charts import Axis, linear_axis
from terrazzo.report.svg import Markup, percent, tag

FORETOLD, FRONT, MEASURED, PRESET, LEFT, CHOSEN = KINDS = (
    "foretold", "front", "measured", "preset", "left", "chosen",
)  # fmt: skip
MARKS = {FORETOLD: "·", FRONT: "o", MEASURED: "x", PRESET: "P", LEFT: "G", CHOSEN: "@"}
WORDS = {
    FORETOLD: "foretold", FRONT: "foretold, none is both faster and thriftier",
    MEASURED: "measured", PRESET: "the vendor's preset", LEFT: "governor left alone",
    CHOSEN: "chosen",
}  # fmt: skip
RADIUS = {FORETOLD: 2, FRONT: 3, MEASURED: 4, PRESET: 6, LEFT: 6, CHOSEN: 8}
EDGE = 0.95
"""Of the least value: where an axis begins, so that the best modes don't lie on it."""
MOST_SPOTS = 1500
"""Foretold ones beyond are thinned: they only show where the cloud lies."""
FAR = 4.0
"""Times the best: the end of the picture."""
STYLE = """
.spots { position: relative; height: 26rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); margin: 1rem 4rem 2.5rem 3.5rem; }
.spots svg { width: 100%; height: 100%; overflow: visible; }
circle.foretold { fill: var(--idle); } circle.front { fill: var(--compute); }
circle.measured { fill: var(--exchange); } circle.preset { fill: var(--sum); }
circle.left { fill: var(--agree); }
circle.chosen { fill: none; stroke: var(--bad); stroke-width: 3px; }
.spots span { position: absolute; color: var(--quiet); font-size: .85rem; white-space: nowrap; }
.spots span.name { margin: 0 0 .4rem .4rem; color: var(--ink); }
"""


@dataclass(frozen=True, slots=True)
class Spot:
    """A mode in the picture."""

    kind: str
    label: str
    step_s: float
    step_j: float

    @property
    def power_w(self) -> float:
        return self.step_j / self.step_s


@dataclass(frozen=True, slots=True)
class ModesView:
    """All that is drawn, the words above it, and where the numbers come from."""

    title: str
    words: tuple[str, ...]
    spots: tuple[Spot, ...]

    @property
    def drawn(self) -> list[Spot]:
        """The least telling first, so that others lie over them; a cloud of thousands thinned.

        Modes that take many times as long or as much as the best are beyond the picture, unless
        they are named in it.
        """
        far_s = FAR * min(spot.step_s for spot in self.spots)
        far_j = FAR * min(spot.step_j for spot in self.spots)
        cloud, rest = [], []
        for spot in self.spots:
            if spot.kind == FORETOLD and spot.step_s <= far_s and spot.step_j <= far_j:
                cloud.append(spot)
            elif spot.kind in (PRESET, LEFT, CHOSEN) or (
                spot.kind != FORETOLD and spot.step_s <= far_s and spot.step_j <= far_j
            ):
                rest.append(spot)
        cloud = cloud[:: max(1, len(cloud) // MOST_SPOTS)]
        return cloud + sorted(rest, key=lambda spot: KINDS.index(spot.kind))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if any(spot.kind == kind for spot in self.spots)]

    def axes(self) -> tuple[Axis, Axis]:
        drawn = self.drawn
        seconds, joules = [s.step_s for s in drawn], [s.step_j for s in drawn]
        return (
            linear_axis([EDGE * min(seconds), *seconds], most=6),
            linear_axis([EDGE * min(joules), *joules], most=5),
        )


def picture(view: ModesView, *, width: int, height: int = 18) -> list[str]:
    """Rows of characters: seconds to the right, joules upwards."""
    x, y = view.axes()
    margin = 8
    columns = max(width - margin - 1, 20)
    cells = [[" "] * columns for _ in range(height)]
    for spot in view.drawn:
        row = height - 1 - round(y.place(spot.step_j) * (height - 1))
        cells[row][round(x.place(spot.step_s) * (columns - 1))] = MARKS[spot.kind]
    marks = {height - 1 - round(y.place(at) * (height - 1)): text for at, text in y.marks}
    rows = [
        f"{marks.get(n, ''):>{margin - 2}} {'┤' if n in marks else '│'}{''.join(row)}"
        for n, row in enumerate(cells)
    ]
    rows.append(" " * (margin - 1) + "└" + "─" * columns)
    low, high = f"{x.low:.3g} s a step", f"{x.high:.3g} s"
    rows.append(" " * margin + low + high.rjust(columns - len(low)))
    return ["joules of a step", *(row.rstrip() for row in rows)]


def keys(view: ModesView) -> list[str]:
    return [f"{MARKS[kind]} {WORDS[kind]}" for kind in view.kinds]


def modes_page(view: ModesView) -> str:
    """One HTML file."""
    style = resources.files("terrazzo.report").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", view.title),
        tag("style", Markup(style + STYLE)),
    )
    parts = [tag("h1", view.title), *(tag("p", text) for text in view.words)]
    body = tag("body", tag("main", *parts, _keys(view), _chart(view), _table(view.spots)))
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _keys(view: ModesView) -> Markup:
    rows = []
    for kind in view.kinds:
        dot = tag("circle", cx=9, cy=9, r=min(RADIUS[kind], 7), class_=kind)
        rows.append(tag("span", tag("svg", dot, width=18, height=18), WORDS[kind]))
    return tag("div", *rows, class_="keys")


def _chart(view: ModesView) -> Markup:
    x, y = view.axes()
    dots = [
        tag(
            "circle", tag("title", _story(spot)), cx=percent(x.place(spot.step_s)),
            cy=percent(1 - y.place(spot.step_j)), r=RADIUS[spot.kind], class_=spot.kind,
        )
        for spot in view.drawn
    ]  # fmt: skip
    words = [
        tag("span", f"{text} s", style=f"left:{percent(x.place(at))};top:102%")
        for at, text in x.marks
    ]
    words += [
        tag("span", f"{text} J", style=f"top:{percent(1 - y.place(at))};right:101%")
        for at, text in y.marks
    ]
    words += [
        tag(
            "span", name, class_="name", style=f"left:{percent(x.place(at_s))};bottom:{percent(up)}"
        )
        for (at_s, up), name in _names(view.drawn, y).items()
    ]
    drawing = tag("svg", *dots, role="img", aria_label="energy of a step over its time, by mode")
    return tag("div", drawing, *words, class_="spots")


def _names(spots: Sequence[Spot], y: Axis) -> dict[tuple[float, float], str]:
    """What stands beside a dot, by its place; those of one place together."""
    found: dict[tuple[float, float], str] = {}
    for spot in spots:
        if spot.kind in (PRESET, LEFT):
            place = spot.step_s, y.place(spot.step_j)
            name = spot.label.partition(" (")[0].partition(",")[0]
            found[place] = f"{found[place]}, {name}" if place in found else name
    return found


def _story(spot: Spot) -> str:
    return (
        f"{spot.label}: {seconds_text(spot.step_s)}, {joules_text(spot.step_j)}, "
        f"{watts_text(spot.power_w)} ({WORDS[spot.kind]})"
    )


def _table(spots: Sequence[Spot]) -> Markup:
    """What is not only foretold, thriftiest first."""
    named = {spot.label for spot in spots if spot.kind == CHOSEN}
    shown = [
        spot
        for spot in spots
        if spot.kind != FORETOLD and not (spot.kind == MEASURED and spot.label in named)
    ]
    shown.sort(key=lambda spot: spot.step_j)
    heads = ("mode", "", "time of a step", "energy", "power")
    rows = [tag("tr", *(tag("th", text) for text in heads))]
    for spot in shown:
        numbers = seconds_text(spot.step_s), joules_text(spot.step_j), watts_text(spot.power_w)
        cells = [tag("td", spot.label, class_="free"), tag("td", WORDS[spot.kind])]
        rows.append(tag("tr", *cells, *(tag("td", text, class_="number") for text in numbers)))
    return tag("div", tag("table", *rows), class_="wide")

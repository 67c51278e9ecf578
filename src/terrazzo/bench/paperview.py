"""The published experiment beside ours, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from terrazzo.bench.paper import curve, figures
from terrazzo.bench.record import Race
from terrazzo.records.units import seconds_text
from terrazzo.report.charts import Bar, bar_chart
from terrazzo.report.svg import Markup, join, tag


def show(races: Sequence[Race], console: Console) -> None:
    table = Table("", "published", "here", "where", box=box.SIMPLE_HEAD, pad_edge=False)
    for figure in figures(races):
        table.add_row(figure.what, figure.published, figure.here, figure.where)
    console.print(table)


def markup(races: Sequence[Race]) -> Markup:
    """The claims, and a curve of grouping for each race."""
    head = tag("tr", *(tag("th", word) for word in ("", "published", "here", "where")))
    rows = [
        tag("tr", *(tag("td", word) for word in (f.what, f.published, f.here, f.where)))
        for f in figures(races)
    ]
    curves = [
        join(tag("h3", race.case.title), bar_chart(_bars(race))) for race in races if curve(race)
    ]
    table = tag("div", tag("table", head, *rows, class_="claims"), class_="wide")
    title = "Seconds a step by groups: one layout, only the borders of groups differ"
    return join(tag("h2", "Beside the published"), table, tag("h2", title),
                *curves)  # fmt: skip


def _bars(race: Race) -> list[Bar]:
    return [
        Bar(groups, {"many": seconds}, seconds_text(seconds)) for groups, seconds in curve(race)
    ]

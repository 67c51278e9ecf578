"""Races as one HTML file that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from terrazzo.bench.record import Provenance, Race, Row
from terrazzo.bench.table import COLUMNS, cells, title
from terrazzo.records.units import bytes_text, seconds_text
from terrazzo.report.charts import Axis, Bar, Curve, bar_chart, line_chart, linear_axis
from terrazzo.report.svg import Markup, tag

STYLE = """
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.race td, .race th { text-align: right; padding: .22rem 0 .22rem .9rem; }
.race td:first-child, .race th:first-child { text-align: left; padding-left: 0; }
.claims td { white-space: normal; min-width: 8rem; }
.claims td:first-child { min-width: 0; }
"""
MEMORY_KEYS = (("idle", "the process before it holds a model"), ("many", "training, beyond that"))


def page(races: Sequence[Race], provenance: Provenance, *, extra: str = "") -> str:
    """The whole document; ``extra`` is markup that comes first."""
    style = resources.files("terrazzo.report").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "Terrazzo race"),
        tag("style", Markup(style), Markup(STYLE)),
    )
    notes = [tag("p", note, class_="quiet") for note in provenance.notes]
    header = tag("header", tag("h1", "Terrazzo race"), tag("p", provenance.text), *notes)
    body = [header, Markup(extra), *_growth(races), *(_race(race) for race in races)]
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", tag("main", *body))}</html>\n'


def _race(race: Race) -> Markup:
    done = [row for row in race.rows if row.done]
    missing = [tag("li", f"{title(row)}: {row.problem}") for row in race.rows if not row.done]
    parts = [
        tag("h2", race.case.title),
        tag("h3", "Seconds a step: shorter is better"),
        bar_chart([_time(race, row) for row in done]),
        tag("h3", "Memory of the device that needs most"),
        bar_chart([_memory(row) for row in done], keys=MEMORY_KEYS),
    ]
    if any(row.sent_bytes for row in done):
        parts += [
            tag("h3", "Bytes sent in a step, by the device that sends most"),
            bar_chart([_sent(row) for row in done]),
        ]
    if missing:
        parts += [tag("h3", "Not in the race, and not beaten"), tag("ul", *missing)]
    return tag("section", *parts, _table(race, done))


def _time(race: Race, row: Row) -> Bar:
    speedup = race.speedup(row)
    beside = "" if speedup is None else f", {speedup:.2f}x"
    kind = "many" if row.exact else "waiting"
    same = "" if row.exact else ", other gradients"
    return Bar(title(row), {kind: row.median_s}, f"{seconds_text(row.median_s)}{beside}{same}")


def _memory(row: Row) -> Bar:
    idle = row.most_bytes - row.most_own_bytes
    text = f"{bytes_text(row.most_bytes)}, {bytes_text(row.most_own_bytes)} beyond idle"
    return Bar(title(row), {"idle": idle, "many": row.most_own_bytes}, text)


def _sent(row: Row) -> Bar:
    most = max(row.sent_bytes or (0,))
    return Bar(title(row), {"exchange": most}, bytes_text(most))


def _table(race: Race, done: Sequence[Row]) -> Markup:
    head = tag("tr", *(tag("th", column) for column in COLUMNS))
    body = [tag("tr", *(tag("td", cell.plain) for cell in cells(race, row))) for row in done]
    return tag("div", tag("table", head, *body, class_="race"), class_="wide")


def _growth(races: Sequence[Race]) -> list[Markup]:
    """Speedup over the number of devices, for each peer that was raced on more than one number."""
    found: list[Markup] = []
    for subject in dict.fromkeys((race.case.model, race.case.batch) for race in races):
        same = [race for race in races if (race.case.model, race.case.batch) == subject]
        counts = sorted({race.devices for race in same})
        if len(counts) < 2:
            continue
        x = Axis(1, counts[-1], [(n, str(n)) for n in range(1, counts[-1] + 1)])
        found.append(tag("h2", f"{subject[0]}, batch {subject[1]}: speedup over devices"))
        for peer in dict.fromkeys(row.peer for race in same for row in race.rows):
            points = [
                (race.devices, speedup)
                for race in sorted(same, key=lambda race: race.devices)
                for row in race.rows
                if row.peer == peer and (speedup := race.speedup(row)) is not None
            ]
            if len(points) > 1:
                y = linear_axis([0.0, *(speedup for _, speedup in points)], from_zero=True)
                curve = Curve(peer, "many", points)
                chart = line_chart([curve], x=x, y=y, x_title="devices", y_title="speedup")
                found.append(chart)
    return found

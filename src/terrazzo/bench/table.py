"""A race as a table on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from terrazzo.bench.record import Race, Row
from terrazzo.records.units import bytes_text, seconds_text

COLUMNS = ("peer", "step", "±", "speedup", "eff.", "peak", "own", "sent", "exact")
LEGEND = (
    "step: median; ±: slowest less fastest; eff.: speedup over what the devices could give; peak: "
    "of the device with most, own: beyond its idle process; sent: by the device that sends most, "
    "in a step; exact: gradients against plain PyTorch's, and how far off"
)


def table(race: Race) -> RenderableType:
    """The figures, why some have none, and what the columns mean."""
    made = Table(title=race.case.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        first = column == "peer"
        made.add_column(column, justify="left" if first else "right", no_wrap=not first)
    for row in race.rows:
        made.add_row(*cells(race, row))
    out = [
        Text(f"{row.peer} is not in the race, and not beaten: {row.problem}", style="yellow")
        for row in race.rows
        if not row.done
    ]
    base = race.baseline
    over = f"speedup over {base.peer}" if base else "no speedup: one device could not do it"
    return Group(made, *out, Text(f"{over}; {LEGEND}", style="dim"))


def cells(race: Race, row: Row) -> list[Text]:
    """What a row says; one that is not in the race has no figures."""
    name = Text(row.peer + (f", {row.choice}" if row.choice else ""), overflow="fold")
    if not row.done:
        return [name, *(Text("–") for _ in COLUMNS[1:])]
    speedup, efficiency = race.speedup(row), race.efficiency(row)
    return [
        name,
        Text(seconds_text(row.median_s)),
        Text(f"{row.spread:.0%}"),
        Text("–" if speedup is None else f"{speedup:.2f}x"),
        Text("" if efficiency is None else f"{efficiency:.0%}"),
        Text(bytes_text(row.most_bytes)),
        Text(bytes_text(row.most_own_bytes)),
        Text("?" if row.sent_bytes is None else bytes_text(max(row.sent_bytes))),
        verdict(row),
    ]


def verdict(row: Row) -> Text:
    if row.gap is None:
        return Text("?")
    if row.broke_promise:
        return Text(f"BROKEN {row.gap:.0e}", style="bold red")
    return Text(f"{'yes' if row.exact else 'no'} {row.gap:.0e}", style="" if row.exact else "dim")

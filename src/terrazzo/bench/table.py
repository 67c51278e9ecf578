"""A race as a table on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from terrazzo.bench.record import Race, Row
from terrazzo.records.units import seconds_text

COLUMNS = ("peer", "step", "n", "±", "speedup", "eff.", "peak MiB", "own MiB", "sent MiB", "exact")
MIB = 1 << 20
LEGEND = (
    "step: median of n measured; ±: slowest less fastest; eff.: speedup over what devices could "
    "give; peak: of the device with most, own: beyond its idle process; sent: by the device that "
    "sends most, in a step; exact: gradients against plain PyTorch's in float64, and how far off"
)


def table(race: Race) -> RenderableType:
    """The figures, why some have none, and what the columns mean."""
    made = Table(title=race.case.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.padding = (0, 1, 0, 0)
    for column in COLUMNS:
        if column == "peer":
            made.add_column(column, min_width=14)
        else:
            made.add_column(column.replace(" ", "\n"), justify="right")
    for row in race.rows:
        made.add_row(*cells(race, row))
    out = [
        Text(f"{title(row)} is not in the race, and not beaten: {row.problem}", style="yellow")
        for row in race.rows
        if not row.done
    ]
    base = race.baseline
    over = f"speedup over {base.peer}" if base else "no speedup: one device could not do it"
    return Group(made, *out, Text(f"{over}; {LEGEND}", style="dim"))


def cells(race: Race, row: Row) -> list[Text]:
    """What a row says; one that is not in the race has no figures."""
    name = Text(title(row) + (f"\n{row.choice}" if row.choice else ""))
    if not row.done:
        return [name, *(Text("–") for _ in COLUMNS[1:])]
    speedup, efficiency = race.speedup(row), race.efficiency(row)
    return [
        name,
        Text(seconds_text(row.median_s)),
        Text(str(len(row.step_s))),
        Text(f"{row.spread:.0%}" if len(row.step_s) > 1 else "–"),
        Text("–" if speedup is None else f"{speedup:.2f}x"),
        Text("" if efficiency is None else f"{efficiency:.0%}"),
        Text(_mib(row.most_bytes)),
        Text(_mib(row.most_own_bytes)),
        Text("?" if row.sent_bytes is None else _mib(max(row.sent_bytes))),
        verdict(row),
    ]


def title(row: Row) -> str:
    """The peer by name; a plan by that of its file."""
    kind, _, rest = row.peer.partition(" ")
    return f"plan {Path(rest).name}" if kind == "plan" else row.peer


def _mib(size_bytes: float) -> str:
    size = size_bytes / MIB
    if size < 0.01:  # a stray frame or two
        return "0"
    return f"{size:.3g}" if size < 1000 else f"{size:.0f}"


def verdict(row: Row) -> Text:
    if row.gap is None:
        return Text("?")
    if row.broke_promise:
        return Text(f"BROKEN {row.gap:.0e}", style="bold red")
    return Text(f"{'yes' if row.exact else 'no'} {row.gap:.0e}", style="" if row.exact else "dim")

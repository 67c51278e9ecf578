"""The published experiment: tiles in groups on Pi-3-class devices, beside what was published.

The published figures are for boards of four cores, against one of those cores. Here a device first
is one thread, and the baseline one whole device; where this machine has the cores, devices also
have four threads, in one process or in four, and the baseline is one of a device's cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.bench.peers import AUTO, ONE_CORE
from terrazzo.bench.record import Race, Row

MODEL = "yolov2-front"
CLUSTERS = ("2xpi3", "3xpi3", "4xpi3", "5xpi3", "6xpi3")
BATCHES = (1, 2, 4, 6)
GROUPS = ("each", "8", "4", "2", "one", "auto")
"""The last: borders as the planner has them, in the same layout."""
PEERS = ("core", "alone", "accumulate", *(f"terrazzo tiles {groups}" for groups in GROUPS), AUTO)


@dataclass(frozen=True, slots=True)
class Figure:
    """One claim: what was published, and what was measured here."""

    what: str
    published: str
    here: str
    where: str


def divisions(threads: int, cores: int) -> list[tuple[int, int]]:
    """Threads and processes of a device: one of one, then several in both ways, if there are."""
    several = [(threads, 1), (threads, threads)] if 1 < threads <= cores else []
    return [(0, 1), *several]


def to_dict(races: Sequence[Race]) -> dict[str, Any]:
    """What the record of the races holds besides."""
    curves = [{"case": race.case.to_dict(), "step_s": dict(curve(race))} for race in races]
    return {"published": [asdict(figure) for figure in figures(races)], "grouping": curves}


def base(race: Race) -> tuple[Row | None, str]:
    """What a speedup is over: one core, where that was measured."""
    core = next((row for row in race.rows if row.peer == ONE_CORE and row.done), None)
    return (core, "one core") if core else (race.baseline, "one device")


def figures(races: Sequence[Race]) -> list[Figure]:
    """The three claims; a claim that nothing here speaks to says so."""
    return [_speedups(races), _memory(races), _grouping(races)]


def _own(race: Race) -> list[Row]:
    return [*_grouped(race), *(row for row in race.rows if row.done and row.peer == AUTO)]


def _grouped(race: Race) -> list[Row]:
    """One layout; only the borders of groups differ."""
    return [row for row in race.rows if row.done and row.peer.startswith("terrazzo")]


def _speedups(races: Sequence[Race]) -> Figure:
    published = "2x to 15x over one core"
    found: dict[str, list[tuple[float, str]]] = {}
    for race in races:
        over, what = base(race)
        if over is not None and _own(race):
            fastest = min(row.median_s for row in _own(race))
            found.setdefault(what, []).append((over.median_s / fastest, race.case.title))
    if not found:
        return Figure("speedup", published, "not measured", "no baseline was done")
    ends = {what: (f"{min(best)[0]:.2f}x", f"{max(best)[0]:.2f}x") for what, best in found.items()}
    here = [f"{' to '.join(dict.fromkeys(both))} over {what}" for what, both in ends.items()]
    where = [f"most over {what}: {max(best)[1]}" for what, best in found.items()]
    return Figure("speedup", published, "; ".join(here), "; ".join(where))


def _memory(races: Sequence[Race]) -> Figure:
    published = "8x less for each device"
    best: list[tuple[float, str]] = []
    for race in races:
        alone = next((row for row in race.rows if row.peer == "alone" and row.done), None)
        least = min((row.most_own_bytes for row in _own(race)), default=0)
        if alone is not None and least:
            best.append((alone.most_own_bytes / least, race.case.title))
    if not best:
        return Figure("memory", published, "not measured", "one device alone did not fit")
    ratio, where = max(best)
    return Figure(
        "memory", published, f"alone needs {ratio:.2f}x as much, beyond the idle process", where
    )


def _grouping(races: Sequence[Race]) -> Figure:
    published = "1.5x over an exchange at every layer"
    gains: list[tuple[float, str]] = []
    for race in races:
        rows = {row.peer: row for row in _grouped(race)}
        each = rows.pop("terrazzo tiles each", None)
        if each is not None and rows:
            best = min(rows.values(), key=lambda row: row.median_s)
            where = f"{race.case.title}, {best.peer.split()[-1]} groups"
            gains.append((each.median_s / best.median_s, where))
    if not gains:
        return Figure("grouping", published, "not measured", "no two groupings were done")
    gain, where = max(gains)
    return Figure("grouping", published, f"{gain:.2f}x", where)


def curve(race: Race) -> list[tuple[str, float]]:
    """Seconds a step by grouping."""
    return [(row.peer.split()[-1], row.median_s) for row in _grouped(race)]

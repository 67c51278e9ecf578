"""Candidate layouts: every sensible way to spread maps over devices of given speeds."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.records import Graph, Layout

FINENESS = 24
"""Shares of a fast device where speeds differ: fine enough for rows of a map."""


def candidates(graph: Graph, speeds: Sequence[float]) -> list[Layout]:
    """Whole, every grid of one or two kinds of cuts, and those that leave slow devices out."""
    devices, images = len(speeds), _images(graph)
    found = [Layout()]
    if devices == 1 or not images:
        return found
    batch = max(shape[0] for shape in images)
    everyone = tuple(speeds)
    for rows, cols in _factors(devices):
        found.append(_grid((("h", rows), ("w", cols)), everyone))
    if batch > 1:
        found.append(_line("n", everyone))
    found.append(_line("c", everyone))
    for one, other in _factors(devices):
        if 1 < one < devices:
            if batch >= one:
                found.append(_grid((("n", one), ("h", other), ("w", 1)), everyone))
                found.append(_grid((("n", one), ("c", other)), everyone))
            found.append(_grid((("h", one), ("w", 1), ("c", other)), everyone))
    for count in _counts(everyone):
        fewer = _fastest(everyone, count)
        found.append(_line("h", fewer))
        found.append(_line("c", fewer))
        if batch > 1:
            found.append(_line("n", fewer))
    found.append(alone(everyone))
    return list(dict.fromkeys(found))


def alone(speeds: Sequence[float]) -> Layout:
    """Everything on the fastest device; the others only keep their weights up to date."""
    best = max(range(len(speeds)), key=lambda device: speeds[device])
    return Layout.samples(tuple(int(device == best) for device in range(len(speeds))))


def shares(speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of speeds; equal ones are all 1."""
    working = {speed for speed in speeds if speed > 0}
    if len(working) == 1:
        return tuple(int(speed > 0) for speed in speeds)
    most = max(speeds)
    return tuple(max(1, round(FINENESS * s / most)) if s > 0 else 0 for s in speeds)


def _line(axis: str, speeds: Sequence[float]) -> Layout:
    cut = shares(speeds)
    return Layout((("h", cut), ("w", (1,)))) if axis == "h" else Layout(((axis, cut),))


def _grid(cuts: Sequence[tuple[str, int]], speeds: Sequence[float]) -> Layout:
    """A row of the grid gets as much as all its devices together can do."""
    parts, inner = [], len(speeds)
    for axis, count in cuts:
        inner //= count
        totals = [0.0] * count
        for device, speed in enumerate(speeds):
            totals[device // inner % count] += speed
        parts.append((axis, shares([round(t / max(totals), 2) for t in totals])))
    return Layout(tuple(parts))


def _counts(speeds: Sequence[float]) -> list[int]:
    """With how few devices it may be worth trying: fewer links to feed, fewer to wait for."""
    devices = len(speeds)
    numbers = {2, devices - 1}
    if len(set(speeds)) > 1:
        numbers |= {devices // 2, devices - 2}
    return sorted(number for number in numbers if 1 < number < devices)


def _fastest(speeds: Sequence[float], count: int) -> tuple[float, ...]:
    order = sorted(range(len(speeds)), key=lambda device: -speeds[device])[:count]
    return tuple(s if device in order else 0.0 for device, s in enumerate(speeds))


def _factors(devices: int) -> list[tuple[int, int]]:
    return [(one, devices // one) for one in range(1, devices + 1) if devices % one == 0]


def _images(graph: Graph) -> list[tuple[int, ...]]:
    return [graph.shape(name) for name in graph.inputs if name and len(graph.shape(name)) == 4]

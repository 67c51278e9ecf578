"""The outcome of a plan for people: rows in a terminal, a table on the page."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.records.units import count_text, seconds_text
from terrazzo.report.outcome import Figure, GroupOutcome, Outcome
from terrazzo.report.screen import Screen
from terrazzo.report.svg import Markup, tag

MOST_DEVICES = 8
"""Columns of a terminal; with more devices, the page has them all."""
WORDS = "Computing is a device's own work; moving is messages and waiting for others."


def show_outcome(found: Outcome, screen: Screen) -> None:
    """What was predicted, and what came of it."""
    screen.title("Predicted and measured")
    screen.line(
        f"A step was to take {seconds_text(found.step.predicted_s)} and took "
        f"{seconds_text(found.step.measured_s)}, with loss, data and optimiser (median of "
        f"{count_text(found.steps, 'step')})."
    )
    for device, (compute, moving) in enumerate(
        zip(found.total.compute, found.total.moving, strict=True)
    ):
        screen.line(
            f"device {device}: computing {_pair(compute)}, moving {_pair(moving)}, sums at the end "
            f"{_pair(found.sums[device])}"
        )
    shown = min(len(found.total.compute), MOST_DEVICES)
    wide = max(min(max(len(group.title) for group in found.groups), screen.width - 6 * shown), 8)
    for number, group in enumerate(found.groups):
        title = group.title if len(group.title) <= wide else group.title[-wide:]
        cells = " ".join(f"{_times(figure):>5}" for figure in group.compute[:shown])
        screen.raw(f"{number:>3} {title:<{wide}} {cells}", "dim")
    screen.line(f"{WORDS} Of groups: measured over predicted computing, by device.", "dim")


def outcome_table(found: Outcome) -> Markup:
    """Every group and device: computing and moving, measured, and predicted below."""
    devices = range(len(found.total.compute))
    heads = [tag("th", "group")]
    for device in devices:
        heads += [tag("th", f"device {device} computing"), tag("th", "moving")]
    rows = [tag("tr", *heads)]
    for number, group in enumerate(found.groups):
        rows.append(_row(f"{number} {group.title}", group))
    rows.append(_row("all", found.total))
    words = (
        f"Medians over {count_text(found.steps, 'step')}, predicted in brackets. A step was to "
        f"take {seconds_text(found.step.predicted_s)} and took "
        f"{seconds_text(found.step.measured_s)}, with loss, data and optimiser. {WORDS}"
    )
    return tag("div", tag("p", words), tag("div", tag("table", *rows), class_="wide"))


def _row(title: str, group: GroupOutcome) -> Markup:
    cells: list[Markup] = []
    for pair in zip(group.compute, group.moving, strict=True):
        cells += [tag("td", text, class_="number") for text in _cells(pair)]
    return tag("tr", tag("td", title, class_="free"), *cells)


def _cells(figures: Sequence[Figure]) -> list[str]:
    return [
        f"{seconds_text(figure.measured_s)} ({seconds_text(figure.predicted_s)})"
        for figure in figures
    ]


def _pair(figure: Figure) -> str:
    times = figure.times
    more = f" ({times:.2f}x)" if times is not None else ""
    return f"{seconds_text(figure.measured_s)} for {seconds_text(figure.predicted_s)}{more}"


def _times(figure: Figure) -> str:
    return "-" if figure.times is None else f"{figure.times:.2f}"

"""The energy of a run for people: lines in a terminal, bars and a table on the page."""

from __future__ import annotations

from terrazzo.records.power import joules_text, watts_text
from terrazzo.records.units import count_text
from terrazzo.report.charts import Bar, bar_chart
from terrazzo.report.energy import PHASE_WORDS, PHASES, DeviceEnergy, RunEnergy
from terrazzo.report.screen import Screen
from terrazzo.report.svg import Markup, tag

CLASS_OF = {"fetch": "feed", "compute": "compute", "exchange": "exchange", "idle": "waiting",
            "rest": "other"}  # fmt: skip
PARTS = "Of processors and GPUs alone, as the sources say: a device draws more than these."
ESTIMATED = "Estimated, not measured: terrazzo power show says what this device could tell."


def show_energy(found: RunEnergy, screen: Screen) -> None:
    screen.title(f"Energy{found.mark}")
    screen.line(sentence(found))
    for row in found.devices:
        parts = [
            f"{phase} {row.phases_j[phase] / row.step_j:.0%}"
            for phase in PHASES
            if row.step_j and row.phases_j[phase] / row.step_j >= 0.005
        ]
        screen.line(f"device {row.device}: {_row(row)} = {', '.join(parts)}")
    for text in remarks(found):
        screen.line(text, "dim")


def energy_section(found: RunEnergy) -> tuple[Markup, ...]:
    bars = [
        Bar(
            f"device {row.device}",
            {CLASS_OF[phase]: row.phases_j[phase] for phase in PHASES},
            _row(row),
        )
        for row in found.devices
    ]
    used = [p for p in PHASES if any(row.phases_j[p] > 0 for row in found.devices)]
    return (
        tag("p", sentence(found)),
        bar_chart(bars, keys=[(CLASS_OF[phase], PHASE_WORDS[phase]) for phase in used]),
        *(tag("p", text, class_="quiet") for text in remarks(found)),
    )


def sentence(found: RunEnergy) -> str:
    each = found.sample_j
    more = "" if each is None else f", {joules_text(each)} a sample"
    return (
        f"A step takes {joules_text(found.step_j)}{more}{found.mark}, on "
        f"{count_text(len(found.devices), 'device')} together (mean of "
        f"{count_text(found.steps, 'step')})."
    )


def _row(row: DeviceEnergy) -> str:
    mark = ", estimated" if not row.is_measured else "" if row.is_whole else ", parts alone"
    return (
        f"{joules_text(row.step_j)} a step, {watts_text(row.mean_w)} on average, "
        f"{watts_text(row.peak_w)} at most{mark}"
    )


def remarks(found: RunEnergy) -> list[str]:
    """Where the numbers are from, and what is wrong with them."""
    kinds = dict.fromkeys(" + ".join(row.sources) for row in found.devices)
    lines = [f"From: {'; '.join(kinds)}."]
    if not found.is_measured:
        lines.append(ESTIMATED)
    elif not found.is_whole:
        lines.append(PARTS)
    lines += [f"device {row.device}: {doubt}" for row in found.devices for doubt in row.doubts]
    if found.missing:
        names = ", ".join(map(str, found.missing))
        lines.append(f"Not in the sum, because they told nothing: device {names}.")
    return lines

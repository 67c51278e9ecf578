"""The verdict: what a run shows in one sentence, and the few numbers to remember."""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.records.units import bytes_text, count_text, gap_text, loss_text, seconds_text
from terrazzo.report.reading import Reading

TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class Fact:
    """A number, and what it is."""

    value: str
    words: str


def verdict(reading: Reading) -> tuple[bool | None, str]:
    """Whether the numbers agree (None: there is nothing to compare), in a sentence."""
    gaps, weights = reading.loss_gaps, reading.comparison
    if not gaps or weights is None:
        return None, ""
    worst = max(gaps.values())
    ok = worst <= TOLERANCE and weights.ok
    many = count_text(reading.devices, "device")
    if ok:
        return True, f"{many} gave the numbers of one: the curves and the weights agree."
    return False, (
        f"{many} did NOT give the numbers of one: losses differ by {gap_text(worst)}, weights by "
        f"{gap_text(weights.weights_worst)} at {weights.weights_where}; the limit is "
        f"{weights.tolerance:.0e}."
    )


def facts(reading: Reading) -> list[Fact]:
    """What is known, the most telling first."""
    found = []
    if reading.loss_gaps:
        steps = count_text(len(reading.loss_gaps), "step")
        worst = max(reading.loss_gaps.values())
        found.append(Fact(gap_text(worst), f"largest relative gap between losses, {steps}"))
    if reading.comparison is not None:
        weights = reading.comparison
        words = f"worst relative difference of final weights, {weights.tensors} tensors"
        found.append(Fact(gap_text(weights.weights_worst), words))
    found += _memory_facts(reading)
    found += _other_facts(reading)
    return found


def _memory_facts(reading: Reading) -> list[Fact]:
    if not reading.memory:
        return []
    own = max(memory.own_bytes for memory in reading.memory)
    if reading.alone is None or not reading.alone.memory:
        peak = bytes_text(max(memory.peak_bytes for memory in reading.memory))
        if not all(memory.idle_bytes for memory in reading.memory):
            return [Fact(peak, "peak memory of a device, idle process included")]
        words = f"training memory of a device beyond the idle process; with it {peak}"
        return [Fact(bytes_text(own), words)]
    alone = reading.alone.memory[0].own_bytes
    words = f"training memory of a device, one device alone: {bytes_text(alone)}"
    return [Fact(bytes_text(own), f"{words} (both without the idle process)")]


def _other_facts(reading: Reading) -> list[Fact]:
    found = []
    sent = [sum(kinds.values()) for kinds in reading.sent_bytes.values()]
    if any(sent):
        found.append(Fact(bytes_text(max(sent)), "sent by a device per step"))
    if not math.isnan(reading.step_s):
        words = "per step"
        if reading.alone is not None and not math.isnan(reading.alone.step_s):
            words += f", one device alone: {seconds_text(reading.alone.step_s)}"
        found.append(Fact(seconds_text(reading.step_s), words))
    if reading.losses and reading.alone is None:
        last = max(reading.losses)
        found.append(Fact(loss_text(reading.losses[last]), f"loss at step {last}"))
    return found

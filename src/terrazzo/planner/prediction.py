"""A prediction: seconds of one training step, where they go, and what limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.planner.clocks import Account
from terrazzo.records.units import bytes_text


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One group: seconds by device, and what it adds to the sums of weight gradients."""

    title: str
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    summed_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step: seconds, where they go on each device, and what limits."""

    step_s: float
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    sums_s: tuple[float, ...]
    """Waiting at the end for sums of weight gradients."""
    groups: tuple[GroupCost, ...]
    sent_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    """The most of a step on each device, with the optimiser's state; empty if not asked for."""
    bottleneck: str


def bottleneck(
    accounts: Sequence[Account],
    groups: Sequence[GroupCost],
    *,
    names: Sequence[str],
    largest: tuple[int, str],
) -> str:
    """What a step spends most on, on the device that computes and sends longest."""
    busiest = max(
        range(len(accounts)), key=lambda d: accounts[d].compute_s + accounts[d].exchange_s
    )
    busy = accounts[busiest]
    parts = {"compute": busy.compute_s, "exchange": busy.exchange_s, "sums": busy.sums_s}
    most = max(parts, key=lambda kind: parts[kind])
    if most == "sums":
        size, weight = largest
        return f"links: weight gradients, the largest those of {weight} ({bytes_text(size)})"
    if most == "exchange":
        place = max(groups, key=lambda group: group.exchange_s[busiest])
        return f"links: maps and statistics, most in {place.title}"
    place = max(groups, key=lambda group: group.compute_s[busiest])
    return f"compute on {names[busiest]}, most in {place.title}"

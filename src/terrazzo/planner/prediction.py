"""What limits a predicted step, in words."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.planner.clocks import Account
from terrazzo.records.prediction import GroupCost, Prediction
from terrazzo.records.units import bytes_text

__all__ = ["GroupCost", "Prediction", "bottleneck"]


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

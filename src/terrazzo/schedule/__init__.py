"""Graph + Plan -> Program: the steps every device executes, as integers only."""

from terrazzo.schedule.lower import lower
from terrazzo.schedule.program import (
    Apply,
    Array,
    Arrive,
    Combine,
    Compute,
    Exchange,
    Move,
    Passes,
    Program,
    Spread,
    Step,
    Strip,
    Take,
)
from terrazzo.schedule.shares import SplitShares, split_shares
from terrazzo.schedule.traffic import Traffic, traffic

__all__ = [
    "Apply",
    "Array",
    "Arrive",
    "Combine",
    "Compute",
    "Exchange",
    "Move",
    "Passes",
    "Program",
    "SplitShares",
    "Spread",
    "Step",
    "Strip",
    "Take",
    "Traffic",
    "lower",
    "split_shares",
    "traffic",
]

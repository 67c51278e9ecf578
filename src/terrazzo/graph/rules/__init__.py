"""One table: for each operator, what a box of its result needs from its arguments.

Rules are integer arithmetic on records. An operator without a rule, or used in a way its rule
does not cover, runs whole.
"""

from terrazzo.graph.rules import (
    channels,
    losses,
    norms,
    pointwise,
    reductions,
    resampling,
    shapes,
    windows,
)
from terrazzo.graph.rules.rule import (
    LOCAL,
    NORM,
    REDUCE,
    SUM,
    WHOLE,
    Axes,
    Letters,
    Local,
    Placement,
    Read,
    Reduction,
    Rule,
    place,
    rule_for,
)

__all__ = [
    "LOCAL",
    "NORM",
    "REDUCE",
    "SUM",
    "WHOLE",
    "Axes",
    "Letters",
    "Local",
    "Placement",
    "Read",
    "Reduction",
    "Rule",
    "channels",
    "losses",
    "norms",
    "place",
    "pointwise",
    "reductions",
    "resampling",
    "rule_for",
    "shapes",
    "windows",
]

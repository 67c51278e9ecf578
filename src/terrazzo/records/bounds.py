"""Bounds: what figures of devices and links can be. Others were not measured by anybody."""

from __future__ import annotations

from math import isfinite
from typing import Any

from terrazzo.errors import UsageError

RATE_BYTES_PER_S = (1e2, 1e13)
"""From a modem of 1962 to forty times the fastest cable there is."""
WAIT_S = (0.0, 60.0)
"""A message that takes longer is taken for lost."""
WORK_S = (0.0, 86400.0)
MEMORY_BYTES = (0, 1 << 50)
STRETCH = (1e-3, 1e6)
FLOPS_PER_S = (1e3, 1e18)


def within_bounds(
    value: Any, bounds: tuple[float, float], *, what: str, unit: str = "", remedy: str
) -> float:
    """The number itself, if it is one and can be."""
    low, high = bounds
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not low <= value <= high:
        raise UsageError(
            f"{what} is {value!r}; between {low:g} and {high:g}{unit and ' ' + unit} are possible: "
            f"{remedy}"
        )
    return float(value)

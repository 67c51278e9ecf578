"""Round numbers for the axes of charts."""

from __future__ import annotations

import math


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high], at most about ``most`` of them."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * part for part in (1, 2, 5, 10) if scale * part >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]

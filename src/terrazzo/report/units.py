"""Numbers as people read them: bytes, seconds, ratios and small differences."""

from __future__ import annotations

import math


def bytes_text(count: float) -> str:
    """``512 B``, ``3.4 KiB``, ``120 MiB``: three digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000 or unit == "GiB":
            break
        count /= 1024
    digits = 0 if unit == "B" or abs(count) >= 100 else 1
    return f"{count:.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """``85 µs``, ``3.4 ms``, ``1.25 s``, ``2 min 5 s``."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size >= 120:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    if size >= 1:
        return f"{seconds:.{1 if size >= 10 else 2}f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.{0 if size >= 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.0f} µs"


def gap_text(gap: float) -> str:
    """A relative difference; zero means the very same bits."""
    if math.isnan(gap):
        return "not a number"
    return "0 (the same bits)" if gap == 0 else f"{gap:.1e}"


def loss_text(loss: float) -> str:
    return f"{loss:.4g}"


def count_text(count: int, noun: str) -> str:
    """``1 device``, ``4 devices``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


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

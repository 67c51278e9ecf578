"""Numbers as people read them: bytes, seconds, ratios and small differences."""

from __future__ import annotations

import math
import re

from terrazzo.errors import UsageError

SCALES = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
}


def bytes_text(count: float) -> str:
    """``512 B``, ``3.4 KiB``, ``120 MiB``: three digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000 or unit == "GiB":
            break
        count /= 1024
    digits = 0 if unit == "B" or abs(count) >= 100 else 1
    return f"{count:.{digits}f} {unit}"


def parse_bytes(text: str | int) -> int:
    """``700MiB``, ``1.5 GiB``, ``900MB`` or a plain number of bytes."""
    if isinstance(text, int):
        found, scale = float(text), 1
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMG]?i?B?)\s*", text)
        unit = match.group(2).rstrip("B").upper() if match else ""
        if match is None or unit not in SCALES:
            raise UsageError(f"{text!r} is no amount of memory: say 700MiB, 1.5GiB or bytes")
        found, scale = float(match.group(1)), SCALES[unit]
    if found <= 0:
        raise UsageError(f"{text} is no amount of memory to work in: say 700MiB or 1.5GiB")
    return int(found * scale)


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

"""Narrow processors: vectors of 128 bits, as boards have them.

There arithmetic is dear beside memory, and oneDNN has kernels for convolutions, but none for their
gradients: it writes all windows out, nine times the map.
"""

from __future__ import annotations

import os
from functools import cache
from math import ceil

import torch
from torch import Tensor

BUILDS = ("DEFAULT", "NO AVX")
LIMITS = ("SSE41", "AVX")
"""What torch says of such processors, and what oneDNN may be limited to."""
STRIP_BYTES = 4 << 20
"""Of what is made on the way, for a strip of rows."""


@cache
def is_narrow() -> bool:
    """By what the processor is, not by trying: equal devices must round alike."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    return limit.upper() in LIMITS or torch.backends.cpu.get_cpu_capability() in BUILDS


def strips(total_bytes: int, most: int) -> int:
    """How many make as much on the way as they may."""
    return min(ceil(total_bytes / STRIP_BYTES), most)


def rows(x: Tensor, top: int, bottom: int) -> Tensor:
    """Some rows of a map; those beyond its border are zeros."""
    last = x.shape[2]
    inside = x[:, :, max(top, 0) : min(bottom, last)]
    if top >= 0 and bottom <= last:
        return inside
    return torch.constant_pad_nd(inside, (0, 0, max(-top, 0), max(bottom - last, 0)))

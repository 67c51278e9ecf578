"""Pointwise convolutions: windows of one pixel, by the faster of two ways that torch has.

With one thread torch leaves them to a matrix product of MKL, unless they are dilated: then oneDNN
computes them, as it does all others. MKL uses AVX-512 on Intel's processors only; on others that
have it oneDNN is up to twice as fast, on Intel's up to twice as slow. One pixel has no gaps to
widen, so the dilation can say what it likes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LEAST = 20480
"""Elements of a single image from which torch takes oneDNN at all; for fewer, and for float64, it
has something slower for dilated windows."""


def gaps_of(x: Tensor, weight: Tensor, dilation: Any) -> Any:
    """The dilation to call a convolution with, and its gradient."""
    if weight.shape[-1] != 1 or weight.shape[-2] != 1 or x.dim() != 4:
        return dilation
    if x.dtype != torch.float32 or x.device.type != "cpu" or not _is_for_onednn():
        return dilation
    return (2, 2) if x.shape[0] > 1 or x.numel() > LEAST else dilation


@cache
def _is_for_onednn() -> bool:
    """By what the processor is, not by trying: equal devices must round alike."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False

"""Vectors: a device's libraries compute in registers as wide as the board's.

A board's have 128 bits, where this machine's may have 512. Slowed to a board's rate with all its
width, it would have so little of a core left that whatever is not arithmetic (Python, messages,
pages of memory) would be slowed far more than on a board. So the libraries below torch are told to
keep to the board's width; each reads its variable when it first computes something.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

ON_X86: Mapping[int, Mapping[str, str]] = {
    128: {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
    256: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
"""Bits, and what ATen, oneDNN and MKL call them. What ATen does itself waits for memory, not for
arithmetic; its narrower build has loops without any vectors (leaky ReLU: 40 times as slow), which
its build for Arm has not."""
WIDTHS = (*ON_X86, 512)


def environment(bits: int) -> Mapping[str, str]:
    """What a device's processes are told; nothing where this machine's own width is the board's.

    Arm's NEON has 128 bits on boards and hosts alike.
    """
    return ON_X86.get(bits, {}) if platform.machine() in ("x86_64", "AMD64") else {}

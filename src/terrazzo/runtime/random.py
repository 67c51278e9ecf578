"""Random numbers keyed by (seed, step, operator, global position).

Each element's number is a hash of where it lies in the whole tensor, so a mask does not depend on
how many devices there are, nor on who computes which box. The hash is the finaliser of SplitMix64
in wrapping 64-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.geometry import Box

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*parts: int) -> int:
    """One 64-bit key from several numbers."""
    key = 0
    for part in parts:
        key = (key + GOLDEN + (part & MASK)) & MASK
        key = ((key ^ (key >> 30)) * FIRST) & MASK
        key = ((key ^ (key >> 27)) * SECOND) & MASK
        key ^= key >> 31
    return key


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(tensor: Tensor, bits: int) -> Tensor:
    """A logical shift right; torch's own keeps the sign."""
    return (tensor >> bits) & ((1 << (64 - bits)) - 1)


def positions(shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """The flat index in the whole tensor of every element of a box."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = math.prod(shape)
    for extent, (low, high) in zip(shape, box.spans, strict=True):
        stride //= max(extent, 1)
        steps = torch.arange(low, high, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + steps
    return index


def uniform(key: int, shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Numbers in [0, 1) in float64, one for each element of a box of a tensor of this shape."""
    state = positions(shape, box, device) * _signed(GOLDEN) + _signed(key)
    state = (state ^ _shifted(state, 30)) * _signed(FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(SECOND)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def normal(key: int, shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Standard normal numbers, by Box and Muller from two draws."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(mix(key, 1), shape, box, device)))
    return radius * torch.cos(2.0 * math.pi * uniform(mix(key, 2), shape, box, device))

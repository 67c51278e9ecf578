"""How far gradients lie from plain PyTorch's, from the files that devices left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

LEAST_SHARE = 1e-3
"""A gradient that is truly zero is measured against this part of the norm of all."""


def load(folder: Path) -> dict[str, Tensor]:
    """What all devices of a turn reported together."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("gradients-*.pt")):
        found |= torch.load(path, weights_only=True)
        path.unlink()
    return found


def worst_gap(seen: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> float:
    """The largest relative difference; infinite if one is missing."""
    if seen.keys() != true.keys():
        return float("inf")
    everything = sum(float(g.double().norm()) ** 2 for g in true.values()) ** 0.5
    gaps = [
        float((seen[name].double() - g.double()).norm())
        / max(float(g.double().norm()), LEAST_SHARE * everything)
        for name, g in true.items()
    ]
    return max(gaps, default=0.0)

"""Comparing the weights of two trainings, from their files and without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from terrazzo.errors import RunError
from terrazzo.records.comparison import Comparison

TOLERANCE = 1e-10


def compare_weights(one: Path, other: Path) -> Comparison:
    """The worst ‖a - b‖ / max(‖b‖, 1e-3 ‖all b‖), as the promise of the project counts it."""
    mine, yours = load_file(one), load_file(other)
    if mine.keys() != yours.keys():
        raise RunError(f"{one} and {other} hold tensors of different names")
    everything = float(np.sqrt(sum(float(np.square(b, dtype="f8").sum()) for b in yours.values())))
    gaps = {}
    for name, b in yours.items():
        size = max(float(np.linalg.norm(b.astype("f8"))), 1e-3 * everything, 1e-300)
        gaps[name] = float(np.linalg.norm(mine[name].astype("f8") - b.astype("f8"))) / size
    # NaN is worse than any number.
    where = max(gaps, key=lambda name: float("inf") if np.isnan(gaps[name]) else gaps[name])
    return Comparison(gaps[where], where, len(gaps), TOLERANCE)

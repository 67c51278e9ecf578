"""Least squares without negative answers: parts of time and power never take away."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
ROUNDS = 400


def not_negative(table: Array, wanted: Array) -> Array:
    """The active-set method of Lawson and Hanson, on columns scaled to one length."""
    scale = np.sqrt((table**2).sum(0))
    scale[scale == 0] = 1.0
    unit = table / scale
    count = unit.shape[1]
    found: Array = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    slope = unit.T @ (wanted - unit @ found)
    for _ in range(ROUNDS):
        if free.all() or slope[~free].max(initial=0.0) <= 1e-10:
            break
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        while True:
            trial: Array = np.zeros(count)
            trial[free] = np.linalg.lstsq(unit[:, free], wanted, rcond=1e-10)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            part = np.min(found[below] / (found[below] - trial[below] + 1e-300))
            found = found + part * (trial - found)
            free &= found > 1e-14
            if not free.any():
                break
        found = trial
        slope = unit.T @ (wanted - unit @ found)
    priced: Array = found / scale
    return priced

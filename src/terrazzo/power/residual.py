"""What formulas leave over: a smooth function of the knobs through noisy points, with its doubt.

A Gaussian process with a length of its own along every knob. Lengths and noise are those that make
the points most likely, looked for one at a time on a coarse grid: there are few points, so a finer
search would only fit their noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from terrazzo.power.least_squares import Array

LENGTHS = (0.3, 0.6, 1.2, 2.5, 6.0)
"""Of the whole range of a knob."""
NOISES = (0.01, 0.05, 0.2, 1.0)
"""Variance of noise, as a part of the function's own."""
ROUNDS = 2


@dataclass(frozen=True)
class Residual:
    """The fitted function; values are in units of ``scale``."""

    points: Array
    lengths: Array
    scale: float
    inverse: Array
    weights: Array
    noise: float
    least_noise: float

    @classmethod
    def fit(cls, points: Array, values: Array, *, least_noise: float) -> Residual:
        """``least_noise`` is what a measurement is known to err by at the least."""
        lengths: Array = np.full(points.shape[1], LENGTHS[2])
        noise = NOISES[1]
        best = _likelihood(points, values, lengths, noise, least_noise=least_noise)
        for _ in range(ROUNDS):
            for knob in range(len(lengths)):
                for length in LENGTHS:
                    trial = lengths.copy()
                    trial[knob] = length
                    likely = _likelihood(points, values, trial, noise, least_noise=least_noise)
                    if likely > best:
                        best, lengths = likely, trial
            for part in NOISES:
                likely = _likelihood(points, values, lengths, part, least_noise=least_noise)
                if likely > best:
                    best, noise = likely, part
        return cls._made(points, values, lengths, noise=noise, least_noise=least_noise)

    def like(self, points: Array, values: Array) -> Residual:
        """Another with the same lengths, through other points."""
        return self._made(
            points, values, self.lengths, noise=self.noise, least_noise=self.least_noise
        )

    @classmethod
    def _made(
        cls, points: Array, values: Array, lengths: Array, *, noise: float, least_noise: float
    ) -> Residual:
        inverse = np.asarray(np.linalg.inv(_covariance(points, lengths, noise)), np.float64)
        variance = max(float(values @ inverse @ values) / len(values), least_noise**2 / noise)
        scale = float(np.sqrt(variance))
        return cls(points, lengths, scale, inverse, inverse @ values, noise, least_noise)

    def at(self, points: Array) -> tuple[Array, Array]:
        """The function, and its standard deviation."""
        cross = kernel(points, self.points, self.lengths)
        left = 1 - ((cross @ self.inverse) * cross).sum(1)
        return cross @ self.weights, self.scale * np.sqrt(np.maximum(left, 0.0))

    def left_out(self) -> tuple[Array, Array]:
        """At each of its own points, the error and the deviation if that had not been known."""
        diagonal = np.diag(self.inverse)
        return self.weights / diagonal, self.scale / np.sqrt(diagonal)


def kernel(one: Array, other: Array, lengths: Array) -> Array:
    """Matérn 5/2: smooth, but not so smooth as to be sure of what is far away."""
    one, other = one / lengths, other / lengths
    square = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    apart = np.sqrt(5.0 * np.maximum(square, 0.0))
    found: Array = (1 + apart + apart**2 / 3) * np.exp(-apart)
    return found


def _covariance(points: Array, lengths: Array, noise: float) -> Array:
    found: Array = kernel(points, points, lengths) + noise * np.eye(len(points))
    return found


def _likelihood(
    points: Array, values: Array, lengths: Array, noise: float, *, least_noise: float
) -> float:
    """How likely the points are, with the best spread there is for these lengths."""
    root = np.linalg.cholesky(_covariance(points, lengths, noise))
    solved = np.linalg.solve(root, values)
    square = float(solved @ solved)
    variance = max(square / len(values), least_noise**2 / noise)
    size = float(np.log(np.diag(root)).sum()) + 0.5 * len(values) * float(np.log(variance))
    return -0.5 * square / variance - size

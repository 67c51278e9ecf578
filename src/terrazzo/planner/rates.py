"""Rates: seconds of any operator on any box, from the boxes that were measured.

For each family of operators two layers are laid over the measured points:

    trend      seconds = a·operations + b·read + c·written + d·weights + e·call, none negative
    residual   the logarithm of measured over trend, interpolated between the points

The trend is physics: it holds far outside of what was measured. The residual makes the result
exact at the points and fades away from them. It is a Gaussian process with an exponential kernel
over the logarithms of rows, inner and outer: the interpolation that bends least between points.

Nothing is ever faster than the best rate that was seen. A family that was not measured is taken by
the trend of all that were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrazzo.records.profile import DeviceProfile, Load, Timing

Vector = NDArray[np.float64]
Sizes = tuple[float, ...]
Get = Callable[[Timing], float | None]

FEW = " few"
"""A variant: the same operator, run by another kernel because it is small."""
FEW_APART = 1.5
LANES = 8
"""Channels that kernels take at a time: 42 cost as much as 48."""
REACH = 2.0
"""How far a point speaks for its neighbours, in factors of e."""
ROUNDS = 200
LEAST_FAMILY, DOUBT = 4, log(1.3)

FORWARD: Get = lambda timing: timing.forward_s  # noqa: E731
BACKWARD_INPUT: Get = lambda timing: timing.backward_input_s  # noqa: E731
BACKWARD_WEIGHT: Get = lambda timing: timing.backward_weight_s  # noqa: E731


@dataclass(frozen=True, slots=True)
class Seconds:
    """One operator on one box."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_input_s + self.backward_weight_s


class Rates:
    """What one device does with any load."""

    def __init__(self, device: DeviceProfile) -> None:
        self.device = device
        forward_s, backward_s = device.calls_s
        products = [t for t in device.timings if t.load.is_product]
        others = [t for t in device.timings if not t.load.is_product]
        self._kinds = [
            _Kind(forward_s, products, others, FORWARD),
            _Kind(backward_s, products, others, BACKWARD_INPUT),
            _Kind(backward_s, products, others, BACKWARD_WEIGHT),
        ]
        self.seconds = lru_cache(maxsize=1 << 16)(self._seconds)

    def _seconds(self, load: Load) -> Seconds:
        sizes, place = _sizes(load), np.array(_place(load))
        forward, by_input, by_weight = (kind.seconds(load, sizes, place) for kind in self._kinds)
        return Seconds(forward, by_input, by_weight if load.is_product else 0.0)

    def step_s(self, load: Load, *, by_input: bool = True, by_weight: bool = True) -> float:
        """Forward and backward; a first layer has no gradient by input, a frozen one no other."""
        found = self.seconds(load)
        return (
            found.forward_s
            + (found.backward_input_s if by_input else 0.0)
            + (found.backward_weight_s if by_weight else 0.0)
        )

    @property
    def call_s(self) -> tuple[float, float]:
        """What an operator costs that computes nothing, such as a view: forward, backward."""
        return self.device.calls_s

    def copy_s(self, count_bytes: float) -> float:
        """Bytes read and written once: slicing, packing, adding up gradients."""
        return count_bytes / self.device.copy_bytes_per_s

    def fresh_s(self, count_bytes: float) -> float:
        """What memory costs that was given back before, on top of writing to it."""
        return count_bytes * self.device.fresh_s_per_byte

    def padding_s(self, elements: int) -> float:
        """Padding so many elements, forward or backward: they are filled and copied."""
        return 2 * self.copy_s(4 * elements)

    def update_s(self, elements: float, optimizer: str = "sgd") -> float:
        """An optimiser's step over so many weights; one that was not measured counts as Adam."""
        known = self.device.update_s_per_element
        return elements * known.get(optimizer, max(known.values(), default=0.0))

    @property
    def flops_per_s(self) -> float:
        """The best that any product reached, forward."""
        return self._kinds[0].best


class _Kind:
    """One direction: all families of products, all families of others."""

    def __init__(
        self, call_s: float, products: Sequence[Timing], others: Sequence[Timing], get: Get
    ) -> None:
        self._call_s = call_s
        self._families: dict[str, _Family] = {}
        self._fallback = {
            is_product: _Trend.fit([t for t in found if get(t) is not None], get)
            for is_product, found in ((True, products), (False, others))
        }
        for found in (products, others):
            for name, timings in _by_family(found, get).items():
                self._families[name] = _Family(timings, get, self._fallback[found is products])
        self.best = max((t.load.flops / s for t in products if (s := get(t))), default=0.0)
        self._best_moved = max((_moved(t.load) / s for t in others if (s := get(t))), default=0.0)

    def seconds(self, load: Load, sizes: Sizes, place: Vector) -> float:
        family = self._families.get(_base(load.family))
        if family is not None:
            found = family.seconds(sizes, place)
        else:
            found = max(self._fallback[load.is_product].seconds(sizes), self._call_s)
        if load.is_product:
            return max(found, load.flops / self.best if self.best else 0.0)
        return max(found, _moved(load) / self._best_moved if self._best_moved else 0.0)


class _Family:
    """The points of one family, its trend, and what the points say beyond it."""

    def __init__(self, timings: Sequence[Timing], get: Get, fallback: _Trend) -> None:
        self.trend = (
            _Trend.fit(timings, get) if len(timings) >= 3 else fallback.scaled(timings, get)
        )
        points: dict[tuple[float, ...], list[float]] = {}
        for timing in timings:
            beyond = log(_given(get(timing)) / self.trend.seconds(_sizes(timing.load)))
            points.setdefault(_place(timing.load), []).append(beyond)
        self._places = np.array(list(points))
        residuals = np.array([fmean(found) for found in points.values()])
        kernel = np.array([_near(self._places - place) for place in self._places])
        kernel += 1e-9 * np.eye(len(points))
        self._weights: Vector = np.linalg.solve(kernel, residuals)

    def seconds(self, sizes: Sizes, place: Vector) -> float:
        residual = float(_near(self._places - place) @ self._weights)
        return self.trend.seconds(sizes) * exp(residual)


@dataclass(frozen=True, slots=True)
class _Trend:
    """Seconds as a sum of parts, each of them a size times a price."""

    prices: tuple[float, ...]

    @classmethod
    def fit(cls, timings: Sequence[Timing], get: Get) -> _Trend:
        """Prices that make the relative errors small, none of them negative."""
        if not timings:
            return cls((0.0,) * len(_sizes(Load("", 1, 0, 1, 1, 1))))
        seconds = np.array([_given(get(t)) for t in timings])
        table = np.array([_sizes(t.load) for t in timings]) / seconds[:, None]
        return cls(tuple(float(p) for p in _not_negative(table, np.ones(len(timings)))))

    def scaled(self, timings: Sequence[Timing], get: Get) -> _Trend:
        """The same shape, through the middle of these few points."""
        ratios = sorted(_given(get(t)) / max(self.seconds(_sizes(t.load)), 1e-12) for t in timings)
        factor = ratios[len(ratios) // 2] if ratios else 1.0
        return _Trend(tuple(price * factor for price in self.prices))

    def seconds(self, sizes: Sizes) -> float:
        return max(_total(self.prices, sizes), 1e-9)


def doubtful(timings: Sequence[Timing]) -> list[int]:
    """Which timings are slower than the rest of their family explains; the worst first.

    Something else may have been using the device then: they are worth measuring again.
    """
    excess: dict[int, float] = {}
    for get in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        families: dict[str, list[int]] = {}
        for place, timing in enumerate(timings):
            if get(timing):
                families.setdefault(timing.load.family, []).append(place)
        for places in families.values():
            if len(places) < LEAST_FAMILY:
                continue
            trend = _Trend.fit([timings[place] for place in places], get)
            beyond = [
                log(_given(get(timings[p])) / trend.seconds(_sizes(timings[p].load)))
                for p in places
            ]
            usual = median(beyond)
            for place, found in zip(places, beyond, strict=True):
                excess[place] = max(excess.get(place, 0.0), found - usual)
    return sorted((p for p, e in excess.items() if e > DOUBT), key=lambda p: -excess[p])


def _total(left: Sizes, right: Sizes) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def _sizes(load: Load) -> Sizes:
    inner, outer = _filled(load)
    return (
        2.0 * load.rows * inner * outer, float(load.reads), float(load.writes),
        float(inner * outer), float(load.outer), 1.0,
    )  # fmt: skip


def _filled(load: Load) -> tuple[int, int]:
    """Inner and outer as a convolution computes them: channels fill up whole vectors.

    Very few channels (a picture's three) and those of depthwise and small convolutions are laid
    out another way.
    """
    if load.window == 1 or load.inner == load.window or load.family.endswith(FEW):
        return load.inner, load.outer
    channels = load.inner // load.window
    filled = channels if channels <= LANES // 2 else -(-channels // LANES) * LANES
    return filled * load.window, -(-load.outer // LANES) * LANES


def _not_negative(table: Vector, wanted: Vector) -> Vector:
    """Least squares without negative answers, one unknown at a time until nothing moves."""
    scale = np.sqrt((table**2).sum(0))
    scale[scale == 0] = 1.0
    unit = table / scale
    square, right = unit.T @ unit, unit.T @ wanted
    found: Vector = np.zeros(table.shape[1])
    for _ in range(ROUNDS):
        before = found.copy()
        for place in range(len(found)):
            if square[place, place] > 0:
                rest = right[place] - square[place] @ found + square[place, place] * found[place]
                found[place] = max(0.0, rest / square[place, place])
        if np.abs(found - before).max() < 1e-9:
            break
    priced: Vector = found / scale
    return priced


def _near(apart: Vector) -> Vector:
    """How much points so far away still say."""
    near: Vector = np.exp(np.sqrt(np.einsum("ij,ij->i", apart, apart)) / -REACH)
    return near


def _place(load: Load) -> tuple[float, ...]:
    few = FEW_APART if load.family.endswith(FEW) else 0.0
    inner, outer = _filled(load)
    return (log(max(load.rows, 1)), log(max(inner, 1)), log(max(outer, 1)), few)


def _moved(load: Load) -> int:
    return load.reads + load.writes


def _base(family: str) -> str:
    return family.removesuffix(FEW)


def _by_family(timings: Iterable[Timing], get: Get) -> dict[str, list[Timing]]:
    found: dict[str, list[Timing]] = {}
    for timing in timings:
        if get(timing):
            found.setdefault(_base(timing.load.family), []).append(timing)
    return found


def _given(value: Any) -> float:
    assert isinstance(value, float)
    return value

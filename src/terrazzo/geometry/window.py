"""Windows: which inputs one dimension of an operator reads to produce a span of outputs.

Spans that a window reads may reach past the tensor; the part outside is padding, and only the
true border of the image has any.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Protocol

from terrazzo.geometry.box import Span


class Window(Protocol):
    """One dimension of an operator."""

    def reads(self, low: int, high: int) -> Span:
        """The inputs read to produce outputs [low, high), which is not empty; not clipped."""
        ...


@dataclass(frozen=True, slots=True)
class Sliding:
    """Convolution and pooling: output o reads o*stride - padding + k*dilation, k < kernel."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def reads(self, low: int, high: int) -> Span:
        first = low * self.stride - self.padding
        last = (high - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        return first, last + 1


@dataclass(frozen=True, slots=True)
class Transposed:
    """Transposed convolution: input i adds to i*stride - padding + k*dilation, k < kernel.

    The span read is wide enough that the inputs, run through the operator without padding, cover
    all of [low, high): also outputs that no input touches (gaps, output padding). ``starts`` says
    where that result begins.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def reads(self, low: int, high: int) -> Span:
        reach = self.dilation * (self.kernel - 1)
        first_touching = -((reach - low - self.padding) // self.stride)
        first_covering = (low + self.padding) // self.stride
        last_touching = (high - 1 + self.padding) // self.stride
        last_covering = -((reach - (high - 1) - self.padding) // self.stride)
        return min(first_touching, first_covering), max(last_touching, last_covering) + 1

    def starts(self, first: int) -> int:
        """The output that input ``first`` reaches first."""
        return first * self.stride - self.padding


def _single(value: float) -> float:
    """Rounded to float32, in which torch computes the indices of nearest upsampling."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class Nearest:
    """Nearest upsampling from ``extent`` to ``result`` elements, indexed as torch does.

    torch has two ways to index, and chooses by size, memory format and number of threads; its
    backward always takes the first. Nearly always they agree, and where they do not
    (``is_ambiguous``) only torch itself can say what it would do.
    """

    extent: int
    result: int
    scale: float | None = None

    def index(self, output: int) -> int:
        """The first way: in float32, with short cuts for equal and doubled sizes."""
        if self.result == self.extent:
            return output
        if self.result == 2 * self.extent:
            return output // 2
        return self._floor(output, _single(self._ratio()))

    def _ratio(self) -> float:
        given = self.scale is not None and self.scale > 0
        return 1.0 / self.scale if given and self.scale else self.extent / self.result

    def _floor(self, output: int, ratio: float) -> int:
        return min(int(_single(output * ratio)), self.extent - 1)

    def is_ambiguous(self, *, double: bool) -> bool:
        """Whether the second way, in the tensor's own precision, reads anything else."""
        ratio = self._ratio() if double else _single(self._ratio())
        return any(self._floor(o, ratio) != self.index(o) for o in range(self.result))

    def reads(self, low: int, high: int) -> Span:
        return self.index(low), self.index(high - 1) + 1


@dataclass(frozen=True, slots=True)
class Bilinear:
    """Linear resampling along one dimension; the span is wide enough for any rounding."""

    extent: int
    result: int
    align_corners: bool = False
    scale: float | None = None

    def position(self, output: int) -> Fraction:
        """Where an output lies among the inputs, before clamping; equal sizes are a plain copy."""
        if self.result == self.extent:
            return Fraction(output)
        if self.align_corners:
            if self.result <= 1:
                return Fraction(0)
            return Fraction(output * (self.extent - 1), self.result - 1)
        if self.scale is not None and self.scale > 0:
            ratio = 1 / Fraction(self.scale)
        else:
            ratio = Fraction(self.extent, self.result)
        return ratio * (output + Fraction(1, 2)) - Fraction(1, 2)

    def reads(self, low: int, high: int) -> Span:
        slack = Fraction(1, 100)
        first = floor(self.position(low) - slack)
        last = floor(self.position(high - 1) + slack) + 1
        limit = self.extent - 1
        return min(max(first, 0), limit), min(max(last, 0), limit) + 1


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Adaptive pooling: output o reads from floor(o*extent/result) to ceil((o+1)*extent/result)."""

    extent: int
    result: int

    def reads(self, low: int, high: int) -> Span:
        return floor(Fraction(low * self.extent, self.result)), ceil(
            Fraction(high * self.extent, self.result)
        )

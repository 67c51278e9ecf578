"""A box: one half-open range per dimension of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Span = tuple[int, int]


def clip(span: Span, extent: int) -> Span:
    """The part of a span that lies inside [0, extent)."""
    low, high = max(span[0], 0), min(span[1], extent)
    return (low, high) if low < high else (0, 0)


@dataclass(frozen=True, slots=True)
class Box:
    """A region of a tensor; all empty boxes of one rank are equal to ``Box.empty(rank)``."""

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if any(high <= low for low, high in self.spans):
            object.__setattr__(self, "spans", ((0, 0),) * len(self.spans))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls(tuple((0, extent) for extent in shape))

    @classmethod
    def empty(cls, rank: int) -> Box:
        return cls(((0, 0),) * rank)

    @property
    def rank(self) -> int:
        return len(self.spans)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.spans)

    @property
    def size(self) -> int:
        """How many elements; a box of rank 0 holds one."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    def intersect(self, other: Box) -> Box:
        return Box(
            tuple(
                (max(a[0], b[0]), min(a[1], b[1]))
                for a, b in zip(self.spans, other.spans, strict=True)
            )
        )

    def hull(self, other: Box) -> Box:
        """The smallest box that holds both; an empty box adds nothing."""
        if self.is_empty:
            return other
        if other.is_empty:
            return self
        return Box(
            tuple(
                (min(a[0], b[0]), max(a[1], b[1]))
                for a, b in zip(self.spans, other.spans, strict=True)
            )
        )

    def contains(self, other: Box) -> bool:
        return other.is_empty or self.intersect(other) == other

    def clip(self, shape: Sequence[int]) -> Box:
        return self.intersect(Box.whole(shape))

    def within(self, outer: Box) -> Box:
        """The same region in the coordinates of a tensor that holds ``outer``."""
        if self.is_empty:
            return self
        return Box(
            tuple(
                (low - start, high - start)
                for (low, high), (start, _) in zip(self.spans, outer.spans, strict=True)
            )
        )

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(low, high) for low, high in self.spans)

    def replace(self, dim: int, span: Span) -> Box:
        spans = list(self.spans)
        spans[dim] = span
        return Box(tuple(spans))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in self.spans) + "]"


def hull(boxes: Iterable[Box], rank: int) -> Box:
    """The smallest box that holds them all."""
    result = Box.empty(rank)
    for box in boxes:
        result = result.hull(box)
    return result

"""A layout as a rule: how every tensor of a group is cut into one box per device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from terrazzo.errors import UsageError

AXES = {"n": "samples", "c": "channels", "h": "rows", "w": "columns"}
"""What can be cut: images of the batch, channels (with the weights that make them), positions."""

FORMS = (
    "whole, tiles:ROWSxCOLS such as tiles:2x3, samples:3, channels:4, uneven shares such as "
    "tiles:3,2,1x1, or several joined by + such as samples:2+tiles:3x1"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Named axes cut into shares; devices number the cells of that grid, first axis outermost.

    ``Layout((("h", (1, 1)), ("w", (1, 2))))`` is two rows of tiles by two columns, the right one
    twice as wide. No cuts at all means whole: every device holds everything.
    """

    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for axis, shares in self.cuts:
            if axis not in AXES:
                raise UsageError(f"layout cuts axis {axis!r}; there are {', '.join(AXES)}")
            whole_numbers = all(isinstance(share, int) for share in shares)
            if not shares or not whole_numbers or min(shares) < 0 or sum(shares) == 0:
                raise UsageError(
                    f"layout has shares {list(shares)} along {axis}; they must be whole numbers, "
                    "not negative, not all zero"
                )
        axes = [axis for axis, _ in self.cuts]
        if len(set(axes)) != len(axes):
            raise UsageError(f"layout cuts an axis twice: {axes}")

    @classmethod
    def tiles(cls, rows: int | tuple[int, ...], cols: int | tuple[int, ...] = 1) -> Layout:
        """Tiles by count (equal shares) or by shares: ``Layout.tiles((3, 2, 1), 2)``."""
        return cls((("h", _counted(rows)), ("w", _counted(cols))))

    @classmethod
    def samples(cls, parts: int | tuple[int, ...]) -> Layout:
        """Whole images to each device: ``Layout.samples(3)``, or by shares."""
        return cls((("n", _counted(parts)),))

    @classmethod
    def channels(cls, parts: int | tuple[int, ...]) -> Layout:
        """All positions, some channels, and only the weights that make them."""
        return cls((("c", _counted(parts)),))

    def __add__(self, other: Layout) -> Layout:
        """Both cuts: ``Layout.samples(2) + Layout.tiles(3)`` is a grid of six."""
        return Layout(self.cuts + other.cuts)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads ``whole``, ``tiles:2x3``, ``samples:3``, ``channels:2,1``, or some joined by +."""
        if text == "whole":
            return cls()
        found = cls()
        for part in text.split("+"):
            found += _parsed(part, text)
        return found

    @property
    def devices(self) -> int:
        """How many devices the grid has; a whole layout fits any number and says 1."""
        return prod(len(shares) for _, shares in self.cuts)

    @property
    def is_whole(self) -> bool:
        return not self.cuts

    @property
    def letters(self) -> str:
        """The axes that are cut."""
        return "".join(axis for axis, _ in self.cuts)

    def __str__(self) -> str:
        if self.is_whole:
            return "whole"
        texts: list[str] = []
        for axis, shares in self.cuts:
            even = len(set(shares)) == 1 or len(shares) == 1
            count = str(len(shares)) if even else ",".join(map(str, shares))
            if axis == "w" and texts and texts[-1].startswith("tiles:"):
                texts[-1] = texts[-1].removesuffix("x1") + f"x{count}"
            elif axis in "hw":
                texts.append(f"tiles:{count}x1" if axis == "h" else f"tiles:1x{count}")
            else:
                texts.append(f"{AXES[axis]}:{count}")
        return "+".join(texts)


def _counted(parts: int | tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * parts if isinstance(parts, int) else tuple(parts)


def _parsed(part: str, text: str) -> Layout:
    match = re.fullmatch(r"tiles:([\d,]+)x([\d,]+)|(samples|channels):([\d,]+)", part)
    if not match:
        raise UsageError(f"layout {text!r} is not understood; write {FORMS}")
    rows, cols, kind, shares = match.groups()
    if kind is None:
        return Layout.tiles(_shares(rows, text), _shares(cols, text))
    make = Layout.samples if kind == "samples" else Layout.channels
    return make(_shares(shares, text))


def _shares(text: str, whole_text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"layout {whole_text!r}: {text!r} is no list of numbers") from error
    if len(numbers) == 1:
        if numbers[0] < 1:
            raise UsageError(f"layout {whole_text!r} has {numbers[0]} parts; it needs at least 1")
        return numbers[0]
    return numbers

"""A layout as a rule: how every tensor of a group is cut into one box per device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from terrazzo.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """Named axes cut into shares; devices number the cells of that grid, first axis outermost.

    ``Layout((("h", (1, 1)), ("w", (1, 2))))`` is two rows of tiles by two columns, the right one
    twice as wide. No cuts at all means whole: every device holds everything.
    """

    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for axis, shares in self.cuts:
            if axis not in ("h", "w"):
                raise UsageError(f"layout cuts axis {axis!r}; this version cuts 'h' and 'w'")
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
        shares = [(1,) * part if isinstance(part, int) else tuple(part) for part in (rows, cols)]
        return cls((("h", shares[0]), ("w", shares[1])))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads ``whole``, ``tiles:2x3`` or uneven ``tiles:3,2,1x2,1``."""
        if text == "whole":
            return cls()
        match = re.fullmatch(r"tiles:([\d,]+)x([\d,]+)", text)
        if not match:
            raise UsageError(
                f"layout {text!r} is not understood; write whole, tiles:ROWSxCOLS such as "
                "tiles:2x3, or uneven shares such as tiles:3,2,1x1"
            )
        rows, cols = (_shares(part, text) for part in match.groups())
        return cls.tiles(rows, cols)

    @property
    def devices(self) -> int:
        """How many devices the grid has; a whole layout fits any number and says 1."""
        return prod(len(shares) for _, shares in self.cuts)

    @property
    def is_whole(self) -> bool:
        return not self.cuts

    def __str__(self) -> str:
        if self.is_whole:
            return "whole"
        parts = dict(self.cuts)
        texts = []
        for axis in ("h", "w"):
            shares = parts.get(axis, (1,))
            even = len(set(shares)) == 1
            texts.append(str(len(shares)) if even else ",".join(map(str, shares)))
        return "tiles:" + "x".join(texts)


def _shares(text: str, whole_text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"layout {whole_text!r}: {text!r} is no list of numbers") from error
    if len(numbers) == 1:
        if numbers[0] < 1:
            raise UsageError(f"layout {whole_text!r} has {numbers[0]} tiles; it needs at least 1")
        return numbers[0]
    return numbers

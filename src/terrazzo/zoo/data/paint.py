"""Painting one picture: shapes in several colours on a textured ground, with noise over all.

Everything is integer arithmetic on numbers from MT19937, whose stream numpy has frozen, so that a
picture is the same to the bit on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.int64]

CLASSES = ("disc", "block", "wedge")

CONTRAST = 70
"""The least distance between the colours of a shape and of the ground, summed over channels."""
TRIES = 20


@dataclass(frozen=True)
class Shape:
    """A shape and the box around it, in pixels: left, top, right, bottom, half-open."""

    label: int
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Picture:
    pixels: Pixels
    """(H, W, 3)"""
    mask: Pixels
    """(H, W): 0 is ground, 1 + class a shape."""
    shapes: tuple[Shape, ...]
    """They never overlap; the box of each is the smallest around its pixels."""


def paint(
    draw: RandomState, size: int, *, most: int, sides: tuple[int, int], label: int | None = None
) -> Picture:
    """A square picture with 1 to ``most`` shapes of sides within ``sides`` thousandths of it.

    All are of class ``label``, or each of a class of its own drawing.
    """
    ground = draw.randint(40, 216, 3).astype(np.int64)
    canvas = ground + _texture(draw, size, 48)[..., None]
    mask: Pixels = np.zeros((size, size), np.uint8)
    shapes: list[Shape] = []
    for _ in range(draw.randint(1, most + 1)):
        kind = draw.randint(len(CLASSES)) if label is None else label
        box = _free_place(draw, size, sides, [shape.box for shape in shapes])
        if box is None:
            continue
        inside = _inside(draw, size, kind, box)
        colour = _colour(draw, ground)
        canvas[inside] = (colour + _texture(draw, size, 20)[..., None])[inside]
        mask[inside] = 1 + kind
        shapes.append(Shape(int(kind), _around(inside)))
    canvas += draw.randint(-10, 11, canvas.shape)
    return Picture(np.clip(canvas, 0, 255).astype(np.uint8), mask, tuple(shapes))


def _texture(draw: RandomState, size: int, strength: int) -> Numbers:
    """Clouds: random numbers on a coarse lattice, with straight lines between them."""
    cells = int(draw.randint(3, 9))
    lattice = draw.randint(-strength, strength + 1, (cells + 1, cells + 1)).astype(np.int64)
    place = np.arange(size, dtype=np.int64) * cells
    low, share = place // size, place % size  # share is in units of 1/size
    columns = lattice[:, low] * (size - share) + lattice[:, low + 1] * share
    rows = columns[low] * (size - share)[:, None] + columns[low + 1] * share[:, None]
    return np.asarray(rows // (size * size), np.int64)


def _colour(draw: RandomState, ground: Numbers) -> Numbers:
    colour: Numbers = draw.randint(0, 256, 3).astype(np.int64)
    while int(np.abs(colour - ground).sum()) < CONTRAST * 3:
        colour = draw.randint(0, 256, 3).astype(np.int64)
    return colour


def _free_place(
    draw: RandomState, size: int, sides: tuple[int, int], taken: list[tuple[int, int, int, int]]
) -> tuple[int, int, int, int] | None:
    """A box that overlaps no other, unless the picture is full."""
    low, high = (max(side * size // 1000, 5) for side in sides)
    for _ in range(TRIES):
        width, height = (int(side) for side in draw.randint(low, high + 1, 2))
        left = int(draw.randint(0, size - width + 1))
        top = int(draw.randint(0, size - height + 1))
        box = (left, top, left + width, top + height)
        if all(_apart(box, other) for other in taken):
            return box
    return None


def _apart(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def _inside(
    draw: RandomState, size: int, kind: int, box: tuple[int, int, int, int]
) -> NDArray[np.bool_]:
    """Which pixels a shape covers; coordinates are doubled, so that centres are integers."""
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    span = np.arange(size, dtype=np.int64)
    x: Any = 2 * span[None, :] + 1 - (left + right)
    y: Any = 2 * span[:, None] + 1 - (top + bottom)
    within = (np.abs(x) < width) & (np.abs(y) < height)
    if CLASSES[kind] == "disc":
        return np.asarray((x * height) ** 2 + (y * width) ** 2 <= (width * height) ** 2)
    if CLASSES[kind] == "block":
        return np.asarray(within)
    flip = 1 if draw.randint(2) else -1  # pointing up or down
    return np.asarray(within & (2 * np.abs(x) * height <= width * (height + flip * y)))


def _around(inside: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The smallest box that holds every pixel of a shape."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

"""Drawings for a terminal: tiles as boxes of lines, pictures as coloured half blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from terrazzo.geometry import Box
from terrazzo.records.detections import Mark, Scene
from terrazzo.report.planview import PlanView
from terrazzo.report.png import Pixels

CORNERS = " ╴╶─╵┘└┴╷┐┌┬│┤├┼"
"""Line characters by which of left, right, up and down they reach (1, 2, 4, 8)."""
LEFT, RIGHT, UP, DOWN = 1, 2, 4, 8
DRAWN = 56
"""Columns of a drawing, at most."""
FOUND, TRUE = (255, 210, 63), (255, 255, 255)


def tiles(view: PlanView, *, width: int) -> list[str]:
    """The tiles over the input; a cell of a terminal is about twice as high as wide."""
    columns = min(width, DRAWN) - 1
    rows = max(min(round(columns * view.height / view.width / 2), 16), 4)
    arms = np.zeros((rows + 1, columns + 1), np.uint8)
    words = np.full(arms.shape, " ", dtype="<U1")
    for tile in dict.fromkeys(view.tiles):
        if tile.is_empty:
            continue
        (top, bottom), (left, right) = tile.spans[-2:]
        y0, y1 = round(top / view.height * rows), round(bottom / view.height * rows)
        x0, x1 = round(left / view.width * columns), round(right / view.width * columns)
        _outline(arms, y0, y1, x0, x1)
        owners = [str(device) for device, own in enumerate(view.tiles) if own == tile]
        noun = "device" if len(owners) == 1 else "devices"
        lines = (f"{noun} {', '.join(owners)}", f"{bottom - top}x{right - left}")
        for row, text in enumerate(lines, start=y0 + 1):
            short = text[: max(x1 - x0 - 2, 0)]
            if row < y1:
                words[row, x0 + 2 : x0 + 2 + len(short)] = list(short)
    return [
        "".join(CORNERS[arm] if arm else word for arm, word in zip(*line, strict=True)).rstrip()
        for line in zip(arms, words, strict=True)
    ]


def parts(boxes: Sequence[Box], *, width: int) -> list[str]:
    """A map and who makes what of it: slabs of images and channels side by side, tiles in each.

    Nothing where boxes have other than two or four dimensions.
    """
    if not boxes or boxes[0].rank not in (2, 4):
        return []
    solid = [box.spans if box.rank == 4 else (*box.spans, (0, 1), (0, 1)) for box in boxes]
    held = [spans for spans, box in zip(solid, boxes, strict=True) if not box.is_empty]
    slabs = sorted({spans[:2] for spans in held})
    tall = max(bottom for *_, (_, bottom), _ in held)
    wide = max(right for *_, (_, right) in held)
    columns = min(width, DRAWN) - 1
    rows = max(2, min(2 * len({spans[2] for spans in held}), 16))
    arms = np.zeros((rows + 1, columns + 1), np.uint8)
    words = np.full((rows + 2, columns + 1), " ", dtype="<U1")
    all_ = sum(_area(slab) for slab in slabs)
    done = 0
    for slab in slabs:
        left, right = (round(edge / all_ * columns) for edge in (done, done + _area(slab)))
        done += _area(slab)
        for spans in sorted({spans for spans in held if spans[:2] == slab}):
            (top, bottom), (begin, end) = spans[2:]
            y0, y1 = round(top / tall * rows), round(bottom / tall * rows)
            x0, x1 = (left + round(edge / wide * (right - left)) for edge in (begin, end))
            _outline(arms, y0, y1, x0, x1)
            owners = ",".join(str(device) for device, own in enumerate(solid) if own == spans)
            _write(words, y0 + 1, x0 + 1, owners[: max(x1 - x0 - 1, 0)])
        sizes = [high - low for low, high in slab]
        _write(words, rows + 1, left + 1, _slab_text(sizes, slabs, room=right - left - 1))
    lines = [
        "".join(CORNERS[arm] if arm else word for arm, word in zip(*line, strict=True)).rstrip()
        for line in zip(arms, words[:-1], strict=True)
    ]
    return lines if len(slabs) == 1 else [*lines, "".join(words[-1]).rstrip()]


def _area(slab: Sequence[tuple[int, int]]) -> int:
    return max(prod(high - low for low, high in slab), 1)


def _slab_text(
    sizes: Sequence[int], slabs: Sequence[Sequence[tuple[int, int]]], *, room: int
) -> str:
    """What a slab is of: ``43 ch``, ``2 img``, ``2 img, 43 ch``; of the last as much as fits."""
    words = (f"{size} {unit}" for size, unit in zip(sizes, ("img", "ch"), strict=True))
    cut = [len({slab[dim] for slab in slabs}) > 1 for dim in range(2)]
    text = ", ".join(word for word, matters in zip(words, cut, strict=True) if matters)
    if len(text) > room:
        text = f"{text.partition(',')[0]}…"
    return text if len(text) <= room else ""


def _write(
    words: np.ndarray[tuple[int, int], np.dtype[np.str_]], y: int, x: int, text: str
) -> None:
    words[y, x : x + len(text)] = list(text)


def _outline(arms: np.ndarray[tuple[int, int], np.dtype[np.uint8]], *box: int) -> None:
    y0, y1, x0, x1 = box
    for y in (y0, y1):
        arms[y, x0:x1] |= RIGHT
        arms[y, x0 + 1 : x1 + 1] |= LEFT
    for x in (x0, x1):
        arms[y0:y1, x] |= DOWN
        arms[y0 + 1 : y1 + 1, x] |= UP


def drawn(pixels: Pixels, scene: Scene, *, width: int) -> Pixels:
    """A picture brought to ``width`` pixels, with the boxes of a scene on it."""
    height = max(round(width * pixels.shape[0] / pixels.shape[1]), 2) // 2 * 2
    down = (np.arange(height) * pixels.shape[0]) // height
    across = (np.arange(width) * pixels.shape[1]) // width
    small: Pixels = pixels[down][:, across].copy()
    for mark in scene.true:
        _frame(small, mark, TRUE, every=2)
    for mark in scene.found:
        _frame(small, mark, FOUND, every=1)
    return small


def _frame(pixels: Pixels, mark: Mark, colour: tuple[int, int, int], *, every: int) -> None:
    height, width, _ = pixels.shape
    x0, x1 = (min(max(round(x * width), 0), width - 1) for x in (mark.left, mark.right))
    y0, y1 = (min(max(round(y * height), 0), height - 1) for y in (mark.top, mark.bottom))
    for y in (y0, y1):
        pixels[y, x0 : x1 + 1 : every] = colour
    for x in (x0, x1):
        pixels[y0 : y1 + 1 : every, x] = colour


def half_blocks(pictures: list[Pixels]) -> list[Text]:
    """Pictures side by side: the upper pixel of a cell in front, the lower one behind."""
    rows = []
    for y in range(0, min(len(picture) for picture in pictures) - 1, 2):
        row = Text()
        for picture in pictures:
            for upper, lower in zip(picture[y].tolist(), picture[y + 1].tolist(), strict=True):
                style = Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
                row.append("▀", style)
            row.append("  ")
        rows.append(row)
    return rows

"""Drawings for a terminal: tiles as boxes of lines, pictures as coloured half blocks."""

from __future__ import annotations

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from terrazzo.records.detections import Mark, Scene
from terrazzo.report.planview import PlanView
from terrazzo.report.png import Pixels

CORNERS = " ╴╶─╵┘└┴╷┐┌┬│┤├┼"
"""Line characters by which of left, right, up and down they reach (1, 2, 4, 8)."""
LEFT, RIGHT, UP, DOWN = 1, 2, 4, 8
FOUND, TRUE = (255, 210, 63), (255, 255, 255)


def tiles(view: PlanView, *, width: int) -> list[str]:
    """The tiles over the input; a cell of a terminal is about twice as high as wide."""
    columns = min(width, 56) - 1
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

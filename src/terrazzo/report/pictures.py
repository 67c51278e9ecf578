"""Pictures on the page: tiles over the input, and boxes around what was found."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from terrazzo.geometry import Box
from terrazzo.records.detections import Mark, Scene
from terrazzo.report.planview import PlanView
from terrazzo.report.svg import Markup, join, tag


def data_uri(path: Path) -> str | None:
    """A PNG file as part of the page; None when it is not there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def tiles_over_input(view: PlanView, picture: str | None) -> Markup:
    """The input with every device's tile, and dashed what it reads beyond."""
    unit = min(view.width, view.height) / 100
    parts = [_ground(view.width, view.height, picture)]
    for need, tile in zip(view.needed, view.tiles, strict=True):
        if need != tile and not need.is_empty:
            parts.append(_rectangle(need, "halo", unit, shrink=1.0))
    for tile in dict.fromkeys(view.tiles):
        if not tile.is_empty:
            parts.append(_rectangle(tile, "tile", unit))
            owners = [device for device, own in enumerate(view.tiles) if own == tile]
            parts.append(_label(tile, owners, unit))
    return tag(
        "svg", *parts, viewBox=f"0 0 {view.width} {view.height}", class_="picture",
        role="img", aria_label=f"input of {view.height} by {view.width} cut into tiles",
    )  # fmt: skip


def _ground(width: int, height: int, picture: str | None) -> Markup:
    if picture is None:
        return tag("rect", width=width, height=height, class_="ground")
    return tag(
        "image", href=picture, width=width, height=height, preserveAspectRatio="none",
        style="image-rendering:pixelated",
    )  # fmt: skip


def _rectangle(box: Box, kind: str, unit: float, *, shrink: float = 0.0) -> Markup:
    (top, bottom), (left, right) = box.spans[-2:]
    inset = shrink * unit
    place = {
        "x": left + inset,
        "y": top + inset,
        "width": max(right - left - 2 * inset, 0.0),
        "height": max(bottom - top - 2 * inset, 0.0),
    }
    # Two strokes, dark under light, so that a line shows on any picture.
    return join(
        tag("rect", **place, class_=f"{kind} under"), tag("rect", **place, class_=f"{kind} over")
    )


def _label(tile: Box, owners: Sequence[int], unit: float) -> Markup:
    (top, _), (left, _) = tile.spans[-2:]
    words = ", ".join(str(owner) for owner in owners)
    noun = "device" if len(owners) == 1 else "devices"
    return tag(
        "text", f"{noun} {words}", x=left + 2.5 * unit, y=top + 7 * unit,
        font_size=5 * unit, stroke_width=1.2 * unit, class_="on-picture",
    )  # fmt: skip


def scene(picture: str, found: Scene, *, width: int = 100) -> Markup:
    """A picture with what the network found; what is truly there is dotted."""
    parts = [tag("image", href=picture, width=width, height=width, preserveAspectRatio="none",
                 style="image-rendering:pixelated")]  # fmt: skip
    parts += [_mark(mark, "true", width) for mark in found.true]
    parts += [_mark(mark, "found", width) for mark in found.found]
    parts += [_mark_label(mark, width) for mark in found.found]
    names = ", ".join(f"{mark.label} {mark.score:.0%}" for mark in found.found) or "nothing"
    return tag(
        "svg", *parts, viewBox=f"0 0 {width} {width}", class_="picture", role="img",
        aria_label=f"found: {names}",
    )  # fmt: skip


def _mark(mark: Mark, kind: str, width: int) -> Markup:
    left, top = max(mark.left, 0.0) * width, max(mark.top, 0.0) * width
    place = {
        "x": left,
        "y": top,
        "width": max(min(mark.right, 1.0) * width - left, 0.0),
        "height": max(min(mark.bottom, 1.0) * width - top, 0.0),
    }
    return join(
        tag("rect", **place, class_=f"{kind} under"), tag("rect", **place, class_=f"{kind} over")
    )


def _mark_label(mark: Mark, width: int) -> Markup:
    words = f"{mark.label} {mark.score:.0%}"
    x = max(min(mark.left * width, width - 3.2 * len(words)), 0.5)  # kept inside the picture
    return tag(
        "text", words, x=x, y=max(mark.top * width - 1.2, 4.5),
        font_size=4.6, stroke_width=1.2, class_="on-picture",
    )  # fmt: skip

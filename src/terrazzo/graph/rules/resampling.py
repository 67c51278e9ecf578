"""Operators that change resolution by indexing: upsampling and pixel shuffles."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from terrazzo.geometry import Bilinear, Box, Nearest, Span
from terrazzo.graph.rules.rule import LOCAL, TABLE, AxesOf, Local, Placement, Read, Rule, whole
from terrazzo.graph.rules.windows import image_place, window_read
from terrazzo.records import Graph, Node


def _scales(node: Node, position: int) -> tuple[float | None, float | None]:
    factors = node.args[position]
    if not isinstance(factors, tuple):
        return None, None
    first, last = factors[0], factors[-1]
    assert isinstance(first, float) and isinstance(last, float)
    return first, last


def _power_of_two(window: Nearest) -> int:
    """A factor whose indices are free of rounding, so torch gives the same on any piece; or 0."""
    ratio = window.result // window.extent
    exact = ratio * window.extent == window.result and ratio & (ratio - 1) == 0
    return ratio if exact and window.scale in (None, ratio) else 0


def _nearest_windows(node: Node, graph: Graph) -> list[Nearest]:
    shape, result = graph.shape(node.refs[0]), graph.shape(node.output)
    return [
        Nearest(a, b, scale)
        for a, b, scale in zip(shape[-2:], result[-2:], _scales(node, 2), strict=True)
    ]


def _nearest_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    double = graph.values[node.refs[0]].dtype == "float64"
    for window in _nearest_windows(node, graph):
        if not _power_of_two(window) and window.is_ambiguous(double=double):
            return whole(node, graph)
    return image_place(node, graph, axes)


def _nearest(node: Node, graph: Graph, box: Box) -> Local:
    shape, windows = graph.shape(node.refs[0]), _nearest_windows(node, graph)
    read = Read(window_read(shape, box, windows).box)
    ratios = [_power_of_two(window) for window in windows]
    if all(ratios):
        spans = read.box.spans[-2:]
        size = tuple((high - low) * r for (low, high), r in zip(spans, ratios, strict=True))
        crop: list[Span] = [(0, high - low) for low, high in box.spans]
        for dim, ((low, high), (start, _), ratio) in enumerate(
            zip(box.spans[-2:], spans, ratios, strict=True), start=len(shape) - 2
        ):
            crop[dim] = (low - start * ratio, high - start * ratio)
        return Local((read,), node.op, (node.args[0], size, None), crop=tuple(crop))
    look_up = tuple(
        (dim, tuple(window.index(o) - read.box.spans[dim][0] for o in range(*box.spans[dim])))
        for dim, window in enumerate(windows, start=len(shape) - 2)
    )
    return Local((read,), "terrazzo.take", (node.args[0], look_up))


def _bilinear(node: Node, graph: Graph, box: Box) -> Local:
    x, _, align_corners, _ = node.args
    shape, result = graph.shape(node.refs[0]), graph.shape(node.output)
    scales = _scales(node, 3)
    windows = [
        Bilinear(a, b, bool(align_corners), scale)
        for a, b, scale in zip(shape[-2:], result[-2:], scales, strict=True)
    ]
    aligned = None if align_corners else _aligned(node, graph, box)
    if aligned is not None:
        return aligned
    read = Read(window_read(shape, box, windows).box)
    places = tuple(
        (span, start, a, b, scale)
        for span, (start, _), a, b, scale in zip(
            box.spans[-2:], read.box.spans[-2:], shape[-2:], result[-2:], scales, strict=True
        )
    )
    return Local((read,), "terrazzo.bilinear", (x, places, bool(align_corners)))


def _aligned(node: Node, graph: Graph, box: Box) -> Local | None:
    """Bilinear by torch's own kernel on a piece that starts on the resampling grid.

    With a ratio of a inputs to b outputs in lowest terms, the pattern repeats every b outputs: a
    piece cut there, with one repeat of margin so that its own border is out of sight, gives the
    same numbers. Worth it only while the repeat is short.
    """
    shape, result = graph.shape(node.refs[0]), graph.shape(node.output)
    spans, size, crop = list(box.spans), [], [(0, high - low) for low, high in box.spans]
    for dim, scale in zip((len(shape) - 2, len(shape) - 1), _scales(node, 3), strict=True):
        common = gcd(shape[dim], result[dim])
        inputs, outputs = shape[dim] // common, result[dim] // common
        exact = outputs & (outputs - 1) == 0  # positions are binary fractions, free of rounding
        if max(inputs, outputs) > 8 or not exact:
            return None
        if scale is not None and scale * inputs != outputs:
            return None
        low, high = box.spans[dim]
        margin = -(-outputs // inputs)  # enough outputs that one whole input lies between
        first = max((low - margin) // outputs, 0)
        last = min(-(-(high + margin) // outputs), common)
        spans[dim] = (first * inputs, last * inputs)
        size.append((last - first) * outputs)
        crop[dim] = (low - first * outputs, high - first * outputs)
    args = (node.args[0], tuple(size), False, None)
    return Local((Read(Box(tuple(spans))),), node.op, args, crop=tuple(crop))


def _shuffle_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    if letters[:-2].strip(".n") or letters[-2:].strip(".hw"):
        return whole(node, graph)  # channels become positions: they stay together
    return Placement(LOCAL, letters)


def _shuffle(spans: Callable[[Span, int], Span]) -> Callable[[Node, Graph, Box], Local]:
    def local(node: Node, graph: Graph, box: Box) -> Local:
        factor = node.args[1]
        assert isinstance(factor, int)
        shape, up = graph.shape(node.refs[0]), node.op == "aten.pixel_shuffle.default"
        channels = len(shape) - 3
        read = Box(
            (
                *box.spans[:channels],
                (0, shape[channels]),
                *(spans(span, factor) for span in box.spans[-2:]),
            )
        )
        crop: list[Span] = [(0, high - low) for low, high in box.spans]
        for dim in (len(shape) - 2, len(shape) - 1) if up else ():
            start = read.spans[dim][0] * factor
            crop[dim] = (box.spans[dim][0] - start, box.spans[dim][1] - start)
        return Local((Read(read),), node.op, node.args, crop=tuple(crop))

    return local


TABLE.add(Rule(place=_nearest_place, local=_nearest), "aten.upsample_nearest2d.vec")
TABLE.add(Rule(place=image_place, local=_bilinear), "aten.upsample_bilinear2d.vec")
TABLE.add(
    Rule(place=_shuffle_place, local=_shuffle(lambda s, r: (s[0] // r, -(-s[1] // r)))),
    "aten.pixel_shuffle.default",
)
TABLE.add(
    Rule(place=_shuffle_place, local=_shuffle(lambda s, r: (s[0] * r, s[1] * r))),
    "aten.pixel_unshuffle.default",
)

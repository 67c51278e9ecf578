"""Operators that slide a window over H and W: convolution, transposed convolution, pooling, pad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.geometry import Adaptive, Box, Sliding, Span, Transposed, Window
from terrazzo.geometry.box import clip
from terrazzo.graph.rules.reductions import global_avg, global_max, global_place
from terrazzo.graph.rules.rule import (
    LOCAL,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Rule,
    addend,
    full,
    whole,
)
from terrazzo.records import Graph, Node


def pair(argument: Any) -> tuple[int, int]:
    """An argument that may be given once for both dimensions."""
    if isinstance(argument, int):
        return argument, argument
    return argument[0], argument[-1]


def image_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """Letters pass through: positions on the last two dimensions, the others before them."""
    letters = axes[node.refs[0]]
    if len(letters) < 3 or len(graph.shape(node.output)) != len(letters):
        return whole(node, graph)
    if letters[:-2].strip(".nc") or letters[-2:].strip(".hw"):
        return whole(node, graph)
    if any(axes[name].strip(".") for name in node.refs[1:]):
        return whole(node, graph)
    return Placement(LOCAL, letters)


def product_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """A convolution: samples and positions pass through, channels are made anew."""
    passed = image_place(node, graph, axes)
    if passed.role == LOCAL and "c" in axes.mask:
        channels = len(passed.axes) - 3
        return Placement(LOCAL, passed.axes[:channels] + "c" + passed.axes[channels + 1 :])
    return passed


def window_read(shape: Sequence[int], box: Box, windows: Sequence[Window]) -> Read:
    """What windows over the last dimensions read; the leading spans are the result's own."""
    lead = len(shape) - len(windows)
    spans, pads = list(box.spans[:lead]), [(0, 0)] * lead
    for dim, window in enumerate(windows, start=lead):
        low, high = window.reads(*box.spans[dim])
        inside = clip((low, high), shape[dim])
        if inside == (0, 0):
            inside, low, high = _reach_image(window, low, high, shape[dim])
        spans.append(inside)
        pads.append((inside[0] - low, high - inside[1]))
    return Read(Box(tuple(spans)), tuple(pads))


def _reach_image(window: Window, low: int, high: int, extent: int) -> tuple[Span, int, int]:
    """Widens a span that lies wholly in the padding until it holds one element of the image.

    It grows by whole strides, so that the operator's grid stays where it was.
    """
    if high <= 0:
        return (0, 1), low, 1
    stride = window.stride if isinstance(window, Sliding) else 1
    low -= -(-(low - extent + 1) // stride) * stride
    return (max(low, 0), extent), low, high


def share_padding(read: Read) -> tuple[Read, tuple[int, ...]]:
    """Moves what padding is equal on both sides from the read to the operator's own argument."""
    own = tuple(min(low, high) for low, high in read.pad[-2:])
    pads = list(read.pad)
    pads[-2:] = [(p[0] - o, p[1] - o) for p, o in zip(read.pad[-2:], own, strict=True)]
    return Read(read.box, tuple(pads)), own


def _same_padding(kernel: int, dilation: int, text: str) -> int:
    return dilation * (kernel - 1) // 2 if text == "same" else 0


def _conv(node: Node, graph: Graph, box: Box) -> Local:
    x, weight, bias, stride_arg, padding_arg, dilation_arg, groups = node.args
    kernel = graph.shape(node.refs[1])[2:]
    stride, dilation = pair(stride_arg), pair(dilation_arg)
    if isinstance(padding_arg, str):
        padding = tuple(
            _same_padding(k, d, padding_arg) for k, d in zip(kernel, dilation, strict=True)
        )
    else:
        padding = pair(padding_arg)
    windows = [
        Sliding(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]
    shape = graph.shape(node.refs[0])
    channels = len(shape) - 3
    read = window_read(shape, box, windows)
    crop: list[Span] = [(0, high - low) for low, high in box.spans]
    for dim, window in enumerate(windows, start=len(shape) - 2):
        start = (read.box.spans[dim][0] - read.pad[dim][0] + window.padding) // window.stride
        crop[dim] = (box.spans[dim][0] - start, box.spans[dim][1] - start)
    read, own = share_padding(read)
    assert isinstance(groups, int)
    part = _Channels.made(
        box.spans[channels], groups, graph.shape(node.refs[1])[0], shape[channels]
    )
    crop[channels] = part.crop
    weights = full(graph, node.refs[1]).box.replace(0, part.weights)
    reads = (
        Read(read.box.replace(channels, part.reads), read.pad),
        Read(weights),
        *(Read(Box((part.weights,))) for _ in node.refs[2:]),
    )
    args = (x, weight, bias, stride, own, dilation, part.groups)
    return Local(reads, "aten.conv2d.default", args, crop=tuple(crop))


def _conv_sums(node: Node, graph: Graph, box: Box, channels: Span) -> Local:
    return addend(_conv(node, graph, box), channels, dim=box.rank - 3, weight_dim=1)


@dataclass(frozen=True, slots=True)
class _Channels:
    """What a range of a convolution's output channels needs, of inputs and weights."""

    reads: Span
    weights: Span
    groups: int
    crop: Span

    @classmethod
    def made(cls, span: Span, groups: int, outputs: int, inputs: int) -> _Channels:
        """With groups, whole groups are computed and what is too much is cropped off."""
        low, high = span
        if groups == 1:
            return cls((0, inputs), span, 1, (0, high - low))
        wide, deep = outputs // groups, inputs // groups
        first, last = low // wide, -(-high // wide)
        weights = (first * wide, last * wide)
        crop = (low - weights[0], high - weights[0])
        return cls((first * deep, last * deep), weights, last - first, crop)


def _conv_transpose(node: Node, graph: Graph, box: Box) -> Local:
    x, weight, bias, stride_arg, padding_arg, _, groups, dilation_arg = node.args
    kernel = graph.shape(node.refs[1])[2:]
    stride, padding, dilation = pair(stride_arg), pair(padding_arg), pair(dilation_arg)
    windows = [
        Transposed(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]
    shape = graph.shape(node.refs[0])
    channels = len(shape) - 3
    read = window_read(shape, box, windows)
    crop: list[Span] = [(0, high - low) for low, high in box.spans]
    for dim, window in enumerate(windows, start=len(shape) - 2):
        start = window.starts(read.box.spans[dim][0] - read.pad[dim][0])
        crop[dim] = (box.spans[dim][0] - start, box.spans[dim][1] - start)
    assert isinstance(groups, int)
    outputs = graph.shape(node.output)[channels]
    part = _Channels.made(box.spans[channels], groups, outputs, shape[channels])
    crop[channels] = part.crop
    weights = full(graph, node.refs[1]).box.replace(0, part.reads)
    reads = (
        Read(read.box.replace(channels, part.reads), read.pad),
        Read(weights.replace(1, part.weights) if groups == 1 else weights),
        *(Read(Box((part.weights,))) for _ in node.refs[2:]),
    )
    args = (x, weight, bias, stride, (0, 0), (0, 0), part.groups, dilation)
    return Local(reads, node.op, args, crop=tuple(crop))


def _conv_transpose_sums(node: Node, graph: Graph, box: Box, channels: Span) -> Local:
    return addend(_conv_transpose(node, graph, box), channels, dim=box.rank - 3, weight_dim=0)


def sums_channels(node: Node) -> bool:
    """Whether every result of a convolution is a sum over all the channels it reads."""
    groups = node.args[6]
    return groups == 1


def _pool_windows(node: Node, dilation: tuple[int, int] = (1, 1)) -> list[Sliding]:
    kernel, padding = pair(node.args[1]), pair(node.args[3])
    stride = pair(node.args[2]) if node.args[2] not in ((), None) else kernel
    return [
        Sliding(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]


def _max_pool(node: Node, graph: Graph, box: Box) -> Local:
    windows = _pool_windows(node, pair(node.args[4]))
    read, own = share_padding(window_read(graph.shape(node.refs[0]), box, windows))
    kernel, stride, dilation = zip(
        *((w.kernel, w.stride, w.dilation) for w in windows), strict=True
    )
    args = (node.args[0], kernel, stride, own, dilation, False)
    return Local((read,), node.op, args, fill=float("-inf"))


def _turning_pool(node: Node, graph: Graph, box: Box) -> Local:
    """All its padding is its own: what lies around is never chosen, whichever way it looks."""
    read = window_read(graph.shape(node.refs[0]), box, _pool_windows(node))
    x, kernel, stride, _, *how = node.args
    reads = (Read(read.box), Read(Box((box.spans[1],))))
    return Local(reads, node.op, (x, kernel, stride, read.pad[-2:], *how))


def _avg_pool(node: Node, graph: Graph, box: Box) -> Local:
    x, _, _, _, _, include_pad, override = node.args
    shape, windows = graph.shape(node.refs[0]), _pool_windows(node)
    read = window_read(shape, box, windows)
    kernel, stride = zip(*((w.kernel, w.stride) for w in windows), strict=True)
    if override is not None:
        divisors: tuple[tuple[int, ...], ...] = ()
    else:
        divisors = tuple(
            tuple(_divisor(window, output, extent, bool(include_pad)) for output in range(*span))
            for window, extent, span in zip(windows, shape[-2:], box.spans[-2:], strict=True)
        )
    return Local((read,), "terrazzo.avg_pool", (x, kernel, stride, divisors, override))


def _divisor(window: Sliding, output: int, extent: int, include_pad: bool) -> int:
    """How many elements torch counts in one window: up to the padded border, or the true one."""
    low, high = window.reads(output, output + 1)
    if include_pad:
        return min(high, extent + window.padding) - low
    low, high = clip((low, high), extent)
    return high - low


def _adaptive(kernel: str) -> Callable[[Node, Graph, Box], Local]:
    def local(node: Node, graph: Graph, box: Box) -> Local:
        shape, result = graph.shape(node.refs[0]), graph.shape(node.output)
        windows = [Adaptive(a, b) for a, b in zip(shape[-2:], result[-2:], strict=True)]
        read = window_read(shape, box, windows)
        cells = tuple(
            tuple(
                (low - start, high - start)
                for low, high in (window.reads(o, o + 1) for o in range(*span))
            )
            for window, span, (start, _) in zip(
                windows, box.spans[-2:], read.box.spans[-2:], strict=True
            )
        )
        return Local((Read(read.box),), kernel, (node.args[0], cells))

    return local


def _pad(node: Node, graph: Graph, box: Box) -> Local:
    """Padding as an operator of its own; constant padding is a shift, the others look up rows."""
    amounts, mode, fill = node.args[1], node.args[2], node.args[3]
    assert isinstance(amounts, tuple)
    shape = graph.shape(node.refs[0])
    pads = [(0, 0)] * len(shape)
    for position in range(0, len(amounts), 2):
        low, high = amounts[position : position + 2]
        assert isinstance(low, int) and isinstance(high, int)
        pads[len(shape) - 1 - position // 2] = (low, high)
    if mode == "constant":
        read = window_read(shape, box, [Sliding(1, 1, before) for before, _ in pads])
        starts = [
            before + span[0] - outside[0]
            for (before, _), span, outside in zip(pads, read.box.spans, read.pad, strict=True)
        ]
        crop = tuple(
            (low - start, high - start)
            for (low, high), start in zip(box.spans, starts, strict=True)
        )
        fill_value = float(fill) if isinstance(fill, (int, float)) else 0.0
        return Local((read,), "aten.alias.default", (node.args[0],), crop=crop, fill=fill_value)
    wanted = [
        tuple(_source(output, extent, pad, str(mode)) for output in range(*span))
        for pad, extent, span in zip(pads, shape, box.spans, strict=True)
    ]
    read = Read(Box(tuple((min(rows), max(rows) + 1) for rows in wanted)))
    look_up = tuple(
        (dim, tuple(row - span[0] for row in rows))
        for dim, (rows, span) in enumerate(zip(wanted, read.box.spans, strict=True))
        if rows != tuple(range(*span))
    )
    return Local((read,), "terrazzo.take", (node.args[0], look_up))


def _source(output: int, extent: int, pad: Span, mode: str) -> int:
    """The element that a padded position repeats; a negative pad crops, and circles crop first."""
    before, after = pad
    if mode == "circular":
        first, left = max(-before, 0), extent + min(before, 0) + min(after, 0)
        return first + (output - max(before, 0)) % left
    if mode == "replicate":
        return min(max(output - before, 0), extent - 1)
    last = extent - 1
    return last - abs(last - abs(output - before))


def _pad_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    if node.args[2] not in ("constant", "reflect", "replicate", "circular"):
        return whole(node, graph)
    return Placement(LOCAL, axes[node.refs[0]])


def _global_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """An adaptive pool to 1x1 is a reduction over all positions, and has its rule there."""
    if graph.shape(node.output)[-2:] == (1, 1):
        return global_place(node, graph, axes)
    return image_place(node, graph, axes)


TABLE.add(
    Rule(place=product_place, local=_conv, sums=_conv_sums, makes="c"),
    "aten.conv2d.default",
    "aten.conv2d.padding",
)
TABLE.add(
    Rule(place=product_place, local=_conv_transpose, sums=_conv_transpose_sums, makes="c"),
    "aten.conv_transpose2d.input",
)
TABLE.add(Rule(place=image_place, local=_max_pool), "aten.max_pool2d.default")
TABLE.add(Rule(place=image_place, local=_turning_pool), "terrazzo.max_pool2d")
TABLE.add(Rule(place=image_place, local=_avg_pool), "aten.avg_pool2d.default")
TABLE.add(
    Rule(place=_global_place, local=_adaptive("terrazzo.adaptive_avg"), reduce=global_avg),
    "aten.adaptive_avg_pool2d.default",
)
TABLE.add(
    Rule(place=_global_place, local=_adaptive("terrazzo.adaptive_max"), reduce=global_max),
    "terrazzo.adaptive_max_pool2d",
)
TABLE.add(Rule(place=_pad_place, local=_pad), "aten.pad.default")


def windowed(node: Node, graph: Graph) -> bool:
    """Whether an operator reads other positions than it writes, so that cut maps need halos.

    What comes after it up to the next such operator needs none, and belongs to its group.
    """
    kind = node.op.split(".")[1]
    if kind == "conv2d":
        stride = pair(node.args[3])
        return max(*graph.shape(node.refs[1])[2:], *stride) > 1
    return kind in (
        "conv_transpose2d", "max_pool2d", "avg_pool2d", "upsample_bilinear2d",
        "upsample_nearest2d", "pixel_shuffle", "pixel_unshuffle", "pad",
    )  # fmt: skip

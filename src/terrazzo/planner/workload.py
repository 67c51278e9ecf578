"""A workload: an operator on a box, read as the sizes that its time depends on.

    conv2d             rows: positions it makes    inner: kernel x inputs   outer: outputs
    conv_transpose2d   rows: positions it reads    inner: inputs            outer: kernel x outputs
    linear, matmul     rows: all but the last      inner: what is summed    outer: the last

Any other operator is taken by its elements: positions by channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from terrazzo.geometry import Box
from terrazzo.graph.rules import Local
from terrazzo.records import Argument, Graph, Node
from terrazzo.records.profile import Load
from terrazzo.schedule.saving import VIEWS

Shape = tuple[int, ...]

FEW_ELEMENTS = 20480
"""Up to so many of one sample torch convolves with a plain kernel of its own, a slower one."""
MATRIX = ("mm", "bmm", "matmul", "addmm", "baddbmm")


def of_node(node: Node, graph: Graph) -> Load | None:
    """All of an operator, as exported; None where it computes nothing."""
    result = graph.shape(node.output) if node.output else ()
    return workload(node.op, node.args, reads=[graph.shape(r) for r in node.refs], result=result)


def of_local(local: Local, box: Box) -> Load | None:
    """A box of an operator, the way a rule says it is computed."""
    reads = [read.box.shape for read in local.reads]
    return workload(local.op, local.args, reads=reads, result=box.shape)


def padded(local: Local) -> int:
    """Elements that are copied, each way, because a read is padded on one side more than the other.

    A box at the border of the image is; ``Rates.padding_s`` says what that takes on top.
    """
    found = 0
    for read in local.reads:
        if any(amount for pad in read.pad for amount in pad):
            sides = zip(read.box.shape, read.pad, strict=True)
            found += prod(extent + low + high for extent, (low, high) in sides)
    return found


def workload(
    op: str, args: Sequence[Argument], *, reads: Sequence[Shape], result: Shape
) -> Load | None:
    """An operator that reads tensors of these shapes; None for a view, which costs a call."""
    kind = op.split(".")[1]
    if kind in VIEWS:
        return None
    if kind == "conv2d":
        return _conv(args, reads, result)
    if kind == "conv_transpose2d":
        return _conv_transpose(args, reads, result)
    if kind == "linear":
        outer, inner = reads[1]
        rows = prod(reads[0]) // inner
        return Load("linear", rows, inner, outer, prod(reads[0]), rows * outer)
    if kind in MATRIX:
        left = reads[1] if kind.startswith(("add", "badd")) else reads[0]
        rows = prod(result) // max(result[-1], 1)
        return Load("matmul", rows, left[-1], result[-1], prod(left), prod(result))
    if kind == "scaled_dot_product_attention":
        query, key = reads[0], reads[1]
        rows = prod(query) // query[-1]
        return Load("attention", rows, 2 * query[-1], key[-2], 3 * prod(query), prod(query))
    return _cheap(kind, args, reads, result)


def _conv(args: Sequence[Argument], reads: Sequence[Shape], result: Shape) -> Load:
    x, weight = reads[0], reads[1]
    stride, groups = _pair(args[3]), _number(args[6])
    outer, inner, rows = weight[0], prod(weight[1:]), prod(result) // result[-3]
    family = f"conv2d {weight[2]}x{weight[3]} s{stride[0]}"
    if groups > 1:
        family += " depthwise" if weight[1] == 1 else " grouped"
    if max(_pair(args[5])) > 1:
        family += " dilated"
    small = max(weight[2:]) <= 3 and groups == 1 and prod(x[:-3]) == 1
    if small and prod(x) <= FEW_ELEMENTS:
        family += " few"
    return Load(family, rows, inner, outer, prod(x), rows * outer, prod(weight[2:]))


def _conv_transpose(args: Sequence[Argument], reads: Sequence[Shape], result: Shape) -> Load:
    x, weight = reads[0], reads[1]
    stride, groups = _pair(args[3]), _number(args[6])
    family = f"conv_transpose2d {weight[2]}x{weight[3]} s{stride[0]}"
    inner = weight[0] // groups
    rows = prod(x) // x[-3]
    return Load(family, rows, inner, prod(weight) // inner, prod(x), prod(result))


def _cheap(kind: str, args: Sequence[Argument], reads: Sequence[Shape], result: Shape) -> Load:
    family = kind
    if kind in ("max_pool2d", "avg_pool2d", "avg_pool"):
        kernel, stride = _pair(args[1]), _pair(args[2] or args[1])
        family = f"{kind.removesuffix('2d')}2d {kernel[0]}x{kernel[1]} s{stride[0]}"
    elements = sum(prod(shape) for shape in reads)
    main = max([result, *reads], key=prod) if reads else result
    channels = main[-3] if len(main) >= 3 else main[-1] if main else 1
    rows = max(1, prod(main) // max(channels, 1))
    return Load(family, rows, 0, max(channels, 1), elements, prod(result))


def _pair(argument: Any) -> tuple[int, int]:
    if isinstance(argument, tuple):
        return (argument[0], argument[-1])
    return (argument, argument)


def _number(argument: Any) -> int:
    assert isinstance(argument, int)
    return argument

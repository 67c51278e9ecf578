"""Operators that mix one dimension and leave the others alone: linear, softmax, layer norm."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.geometry import Box, Span
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
    is_cut,
    whole,
)
from terrazzo.records import Graph, Node

Mixed = Callable[[Node, int], tuple[int, ...]]
"""Which dimensions (of a rank) a node mixes."""


def _along(position: int) -> Mixed:
    def mixed(node: Node, rank: int) -> tuple[int, ...]:
        dim = node.args[position]
        assert isinstance(dim, int)
        return (dim % rank,)

    return mixed


def _normalized(node: Node, rank: int) -> tuple[int, ...]:
    shape = node.args[1]
    assert isinstance(shape, tuple)
    return tuple(range(rank - len(shape), rank))


def _indexed(node: Node, rank: int) -> tuple[int, ...]:
    indices = node.args[1]
    assert isinstance(indices, tuple)
    return tuple(dim for dim, index in enumerate(indices) if index is not None)


def mixing(mixed: Mixed) -> Rule:
    """A rule for an operator whose first argument is cut only where it does not mix."""

    def place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
        letters = axes[node.refs[0]]
        dims = mixed(node, len(letters))
        if any(letters[dim] != "." for dim in dims) or not is_cut(letters):
            return whole(node, graph)
        if any(is_cut(axes[name]) for name in node.refs[1:]):
            return whole(node, graph)
        if len(graph.shape(node.output)) != len(letters):
            return whole(node, graph)  # an index of two dimensions makes one more
        return Placement(LOCAL, letters)

    def local(node: Node, graph: Graph, box: Box) -> Local:
        shape = graph.shape(node.refs[0])
        read = box
        for dim in mixed(node, len(shape)):
            read = read.replace(dim, (0, shape[dim]))
        reads = (Read(read), *(full(graph, name) for name in node.refs[1:]))
        return Local(reads, node.op, node.args)

    return Rule(place=place, local=local)


def _linear_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    made = "c" if "c" in axes.mask and "c" not in letters[:-1] else "."
    if letters[-1] not in (".", made) or any(is_cut(axes[name]) for name in node.refs[1:]):
        return whole(node, graph)
    letters = letters[:-1] + made
    return Placement(LOCAL, letters) if is_cut(letters) else whole(node, graph)


def _linear(node: Node, graph: Graph, box: Box) -> Local:
    shape, made = graph.shape(node.refs[0]), box.spans[-1]
    reads = (
        Read(box.replace(box.rank - 1, (0, shape[-1]))),
        Read(Box((made, (0, shape[-1])))),
        *(Read(Box((made,))) for _ in node.refs[2:]),
    )
    return Local(reads, node.op, node.args)


def _linear_sums(node: Node, graph: Graph, box: Box, channels: Span) -> Local:
    return addend(_linear(node, graph, box), channels, dim=box.rank - 1, weight_dim=1)


def _per_channel_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    if any(is_cut(axes[name]) for name in node.refs[1:]):
        return whole(node, graph)
    return Placement(LOCAL, letters)


def _per_channel(node: Node, graph: Graph, box: Box) -> Local:
    """Each channel with its own numbers, or all with one."""
    reads = [Read(box)]
    for name in node.refs[1:]:
        alone = graph.shape(name)[0] == 1 or box.rank < 2
        reads.append(full(graph, name) if alone else Read(Box((box.spans[1],))))
    return Local(tuple(reads), node.op, node.args)


TABLE.add(
    Rule(place=_linear_place, local=_linear, sums=_linear_sums, makes="c"), "aten.linear.default"
)
TABLE.add(
    Rule(place=_per_channel_place, local=_per_channel),
    "aten.prelu.default",
    "aten.batch_norm.default",
)
TABLE.add(
    mixing(_along(1)),
    "aten.softmax.int",
    "aten._softmax.default",
    "aten.log_softmax.int",
    "aten._log_softmax.default",
    "aten.glu.default",
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.index_select.default",
)
TABLE.add(mixing(_normalized), "aten.layer_norm.default", "aten.rms_norm.default")
TABLE.add(mixing(_indexed), "aten.index.Tensor")

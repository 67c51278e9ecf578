"""Operators that mix one dimension and leave the others alone: linear, softmax, layer norm."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.geometry import Box
from terrazzo.graph.rules.rule import (
    LOCAL,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Rule,
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


def _last(node: Node, rank: int) -> tuple[int, ...]:
    return (rank - 1,)


def _channel(node: Node, rank: int) -> tuple[int, ...]:
    return (1,) if rank > 1 else ()


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


TABLE.add(mixing(_last), "aten.linear.default")
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
TABLE.add(mixing(_channel), "aten.prelu.default", "aten.batch_norm.default")

"""Norms whose statistics run over positions: batch, instance and group norm."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from terrazzo.geometry import Box, Span
from terrazzo.graph.rules.rule import (
    LOCAL,
    NORM,
    REDUCE,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Reduction,
    Rule,
    blank,
    whole,
)
from terrazzo.records import Argument, Graph, Node

BATCH, INSTANCE, GROUP = "batch", "instance", "group"


@dataclass(frozen=True, slots=True)
class Norm:
    """The arguments of a norm by name, whatever their order."""

    kind: str
    x: Argument
    weight: Argument
    bias: Argument
    eps: Argument
    groups: int = 0
    mean: Argument = None
    variance: Argument = None
    momentum: Argument = None


def family(node: Node) -> Norm:
    """Reads a node of one of the three norms."""
    if node.op == "terrazzo.group_norm":
        x, groups, weight, bias, eps = node.args
        assert isinstance(groups, int)
        return Norm(GROUP, x, weight, bias, eps, groups)
    x, weight, bias, mean, variance, momentum, eps = node.args
    kind = BATCH if node.op == "terrazzo.batch_norm" else INSTANCE
    return Norm(kind, x, weight, bias, eps, 0, mean, variance, momentum)


def rows_of(kind: str, groups: int, shape: tuple[int, ...]) -> int:
    """How many pairs of mean and variance a norm has."""
    if kind == BATCH:
        return shape[1]
    return shape[0] * (shape[1] if kind == INSTANCE else groups)


def statistics(node: Node, graph: Graph) -> tuple[int, int]:
    """How many (mean, variance) pairs a norm has, and over how many elements each runs."""
    norm, shape = family(node), graph.shape(node.refs[0])
    pairs = rows_of(norm.kind, norm.groups, shape)
    return pairs, prod(shape) // pairs


def _place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    if not node.outputs[0]:
        return whole(node, graph)  # only its running statistics are wanted
    if len(letters) != 4 or letters[:2].strip(".nc") or letters[2:].strip(".hw"):
        return whole(node, graph)
    if "c" in letters and family(node).kind != BATCH:
        return whole(node, graph)  # statistics of a group of channels need all of it
    return Placement(NORM, letters)


def _moments_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    if set(axes[node.refs[0]]) <= set(".c"):
        return Placement(LOCAL, ".c")  # a device has every element of its channels
    return Placement(REDUCE, blank(node, graph))


def _moments_local(node: Node, graph: Graph, box: Box) -> Local:
    read = Box.whole(graph.shape(node.refs[0])).replace(1, box.spans[1])
    return Local((Read(read),), node.op, node.args)


def _rows(node: Node, graph: Graph, box: Box) -> Span:
    """The pairs of statistics that a box of the input has a part in."""
    kind, groups = node.args[-2:]
    shape = graph.shape(node.refs[0])
    if kind == BATCH:
        return box.spans[1]
    each = rows_of(str(kind), int(str(groups)), shape) // shape[0]
    low, high = box.spans[0]
    return low * each, high * each


def _moments(node: Node, graph: Graph) -> Reduction:
    shape = graph.shape(node.output)
    return Reduction(
        main=0,
        partial=lambda box: Local((Read(box),), node.op, node.args),
        combine="moments",
        shape=shape,
        keeps=lambda box: Box(((0, 2), _rows(node, graph, box))),
    )


def _normalize_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    return Placement(LOCAL, axes[node.refs[0]])


def _normalize(node: Node, graph: Graph, box: Box) -> Local:
    """Once the statistics are known, every element needs only itself."""
    moments = Box(((0, 2), _rows(node, graph, box)))
    affine = (Read(Box((box.spans[1],))) for _ in node.refs[2:])
    return Local((Read(box), Read(moments), *affine), node.op, node.args)


TABLE.add(
    Rule(place=_place), "terrazzo.batch_norm", "terrazzo.instance_norm", "terrazzo.group_norm"
)
TABLE.add(Rule(place=_moments_place, local=_moments_local, reduce=_moments), "terrazzo.moments")
TABLE.add(Rule(place=_normalize_place, local=_normalize), "terrazzo.normalize")

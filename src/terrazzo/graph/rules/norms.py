"""Norms whose statistics run over positions: batch, instance and group norm."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from terrazzo.geometry import Box
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
    full,
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
    if len(letters) != 4 or letters[:2].strip("."):
        return whole(node, graph)
    return Placement(NORM, letters)


def _moments_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    return Placement(REDUCE, blank(node, graph))


def _moments(node: Node, graph: Graph) -> Reduction:
    shape = graph.shape(node.output)
    everything = Box.whole(shape)
    return Reduction(
        main=0,
        partial=lambda box: Local((Read(box),), node.op, node.args),
        combine="moments",
        shape=shape,
        keeps=lambda box: everything,
    )


def _normalize_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    return Placement(LOCAL, axes[node.refs[0]])


def _normalize(node: Node, graph: Graph, box: Box) -> Local:
    """Once the statistics are known, every element needs only itself."""
    reads = (Read(box), *(full(graph, name) for name in node.refs[1:]))
    return Local(reads, node.op, node.args)


TABLE.add(
    Rule(place=_place), "terrazzo.batch_norm", "terrazzo.instance_norm", "terrazzo.group_norm"
)
TABLE.add(Rule(place=_moments_place, reduce=_moments), "terrazzo.moments")
TABLE.add(Rule(place=_normalize_place, local=_normalize), "terrazzo.normalize")

"""Norms whose statistics run over positions: batch, instance and group norm."""

from __future__ import annotations

from terrazzo.geometry import Box
from terrazzo.graph.rules.rule import (
    NORM,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Rule,
    full,
    whole,
)
from terrazzo.records import Graph, Node

FAMILIES = ("terrazzo.batch_norm", "terrazzo.instance_norm", "terrazzo.group_norm")


def _place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    if len(letters) != 4 or letters[:2].strip("."):
        return whole(node, graph)
    return Placement(NORM, letters)


def _local(node: Node, graph: Graph, box: Box) -> Local:
    """Once the statistics are known, every element needs only itself."""
    reads = (Read(box), *(full(graph, name) for name in node.refs[1:]))
    return Local(reads, node.op, node.args)


def statistics(node: Node, graph: Graph) -> tuple[int, int]:
    """How many (mean, variance) pairs a norm has, and over how many elements each runs."""
    shape = graph.shape(node.refs[0])
    elements = 1
    for extent in shape:
        elements *= extent
    if node.op == "terrazzo.batch_norm":
        pairs = shape[1]
    elif node.op == "terrazzo.instance_norm":
        pairs = shape[0] * shape[1]
    else:
        groups = node.args[1]
        assert isinstance(groups, int)
        pairs = shape[0] * groups
    return pairs, elements // pairs


TABLE.add(Rule(place=_place, local=_local), *FAMILIES)

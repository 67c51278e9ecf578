"""Norms over cut maps, said in two words: statistics, then normalising.

Statistics are a reduction over what every device owns. Normalising with known statistics is
pointwise, so it can be done on halos, in passes, and again in the backward pass. A norm that runs
whole stays one operator, as torch has it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from terrazzo.graph.rules.norms import family, statistics
from terrazzo.records import Graph, Node, Ref, Value


def expand_norms(graph: Graph, split: Set[int]) -> Graph:
    """The graph with these norms taken apart; all other names stay."""
    values, nodes = dict(graph.values), []
    for index, node in enumerate(graph.nodes):
        if index not in split:
            nodes.append(node)
            continue
        moments, parts = taken_apart(node, graph)
        values[moments.name] = moments
        nodes += parts
    return replace(graph, values=values, nodes=tuple(nodes))


def taken_apart(node: Node, graph: Graph) -> tuple[Value, list[Node]]:
    """A norm in two words, and what stands between them: statistics, normalising and, where it has
    any, new running statistics."""
    moments = _moments_value(node, graph)
    return moments, _parts(node, graph, Ref(moments.name))


def _moments_value(node: Node, graph: Graph) -> Value:
    """Two rows, the means and the variances."""
    pairs, _ = statistics(node, graph)
    exact = "float64" if graph.values[node.refs[0]].dtype == "float64" else "float32"
    return Value(f"{node.output}.moments", "node", (2, pairs), exact)


def _parts(node: Node, graph: Graph, moments: Ref) -> list[Node]:
    norm = family(node)
    _, count = statistics(node, graph)
    parts = [
        Node(
            "terrazzo.moments",
            (norm.x, norm.kind, norm.groups),
            (moments.name,),
            node.layer,
            gradient=node.gradient,
        ),
        Node(
            "terrazzo.normalize",
            (norm.x, moments, norm.weight, norm.bias, norm.eps, norm.kind, norm.groups),
            (node.output,),
            node.layer,
            node.flops,
            node.gradient,
        ),
    ]
    if any(node.outputs[1:]):
        samples = graph.shape(node.refs[0])[0]
        args = (moments, norm.mean, norm.variance, norm.momentum, count, samples)
        parts.append(Node("terrazzo.running", args, node.outputs[1:], node.layer, gradient=False))
    return parts

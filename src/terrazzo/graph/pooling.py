"""Max pools, moved ahead of what does not change which of two numbers is larger.

The largest of a window stays the largest under a rising function, rounding included. So

    normalize ─ activation ─ max pool    becomes    max pool ─ normalize ─ activation

and what runs on a quarter of the elements costs a quarter, there and back, and keeps a quarter for
the way back. Statistics still run over everything: a norm is taken apart for it. Where a norm turns
a channel round (its weight is negative) the smallest is taken there, and where it makes all alike
the first, so the norm's weight goes with the pool.

Where numbers that differ by a rounding become one under the function, torch gives the gradient to
the first of them and this to the largest.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from terrazzo.graph.expand import taken_apart
from terrazzo.graph.flops import flops
from terrazzo.graph.rules.windows import pair
from terrazzo.records import Graph, Node, Ref

POOL = "aten.max_pool2d.default"
TURNING_POOL = "terrazzo.max_pool2d"
"""The same with a weight for each channel behind its arguments, by whose sign it goes."""
NORM, FIXED_NORM = "terrazzo.batch_norm", "aten.batch_norm.default"
"""A batch norm in training, and one whose statistics are given."""
RISING = frozenset(
    f"aten.{name}.default" for name in "relu leaky_relu hardtanh sigmoid hardsigmoid tanh".split()
)
WIDEST = 3
"""Windows wider than this have too many places to compare one after the other."""
WORTH = 2
"""By how much a pool has to shrink a map."""
EARLY = ".early"
"""What a pool makes that was moved is named after what it made before."""


def pool_first(graph: Graph) -> Graph:
    """The graph with its max pools as early as they may stand; what they make keeps its name."""
    for name in [node.output for node in graph.nodes if node.op == POOL]:
        index = graph.producer[name]
        if _shrinks(graph, graph.nodes[index]):
            before = _before(graph, index)
            graph = _moved(graph, index, before) if before else graph
    return graph


def by_rows(kernel: Any, dilation: Any, ceil: Any) -> bool:
    """Whether a pool on a CPU goes by rows (``runtime/pooling.py``), which keeps a byte for each
    maximum and nothing else; torch's own keeps an index, and what it has read."""
    return not ceil and max(pair(dilation)) == 1 and max(pair(kernel)) <= WIDEST


def end_of(graph: Graph, index: int) -> int:
    """The last of the operators that an operator stands for: of a pool that was moved, the one
    that now makes what the pool made."""
    return graph.producer.get(graph.nodes[index].output.removesuffix(EARLY), index)


def _shrinks(graph: Graph, pool: Node) -> bool:
    shape, result = graph.shape(pool.refs[0]), graph.shape(pool.output)
    _, _, _, _, dilation, ceil = pool.args
    plain = not ceil and dilation in (1, (1, 1))
    return plain and len(shape) == 4 and prod(shape) >= WORTH * prod(result)


def _before(graph: Graph, index: int) -> list[int]:
    """The operators that a pool may change places with, the last one first."""
    found: list[int] = []
    pool, name = graph.nodes[index], graph.nodes[index].refs[0]
    results = {argument.name for argument in graph.outputs if isinstance(argument, Ref)}
    while name not in results and len(graph.consumers[name]) == 1:
        at = graph.producer.get(name)
        if at is None or not _is_rising(graph.nodes[at]) or graph.nodes[at].output != name:
            break
        if graph.nodes[at].gradient != pool.gradient:
            break
        found.append(at)
        name = graph.nodes[at].refs[0]
        if graph.nodes[at].op in (NORM, FIXED_NORM):
            break  # what it is a norm of is read by its statistics; and a pool goes by one sign
    return found


def _is_rising(node: Node) -> bool:
    if node.op == "aten.leaky_relu.default":
        slope = node.args[1] if len(node.args) > 1 else 0.0
        return isinstance(slope, (int, float)) and slope >= 0
    return node.op in RISING or (node.op in (NORM, FIXED_NORM) and bool(node.outputs[0]))


def _moved(graph: Graph, index: int, before: list[int]) -> Graph:
    """``before`` are the operators that the pool goes ahead of, the last one first."""
    pool, shape = graph.nodes[index], graph.shape(graph.nodes[index].output)
    source = graph.nodes[before[-1]].refs[0]
    values, ahead = dict(graph.values), pool.output + EARLY
    values[ahead] = replace(values[source], name=ahead, kind="node", shape=shape, target="")
    new: dict[int, list[Node]] = {index: []}
    for at in before:
        node = graph.nodes[at]
        if at == before[0]:
            del values[node.output]
            node = replace(node, outputs=(pool.output, *node.outputs[1:]))
        else:
            values[node.output] = replace(values[node.output], shape=shape)
        new[at] = [node]
    (first,) = new[before[-1]]
    early = replace(pool, args=(Ref(source), *pool.args[1:]), outputs=(ahead,))
    if first.op in (NORM, FIXED_NORM) and first.args[1] is not None:
        early = replace(early, op=TURNING_POOL, args=(*early.args, first.args[1]))
    if first.op == NORM:
        moments, (statistics, normalize, *running) = taken_apart(first, graph)
        values[moments.name] = moments
        # Edges of what was pooled can leave before statistics are taken, and arrive with them.
        new[before[-1]] = [early, statistics, *running, _reading(ahead, normalize)]
    else:
        new[before[-1]] = [early, _reading(ahead, first)]
    nodes = [
        replace(node, flops=flops(node, values)) if at in new else node
        for at, old in enumerate(graph.nodes)
        for node in new.get(at, [old])
    ]
    return replace(graph, values=values, nodes=tuple(nodes))


def _reading(name: str, node: Node) -> Node:
    return replace(node, args=(Ref(name), *node.args[1:]))

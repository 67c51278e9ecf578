"""Borders: where groups may end."""

from __future__ import annotations

from terrazzo.graph.rules import rule_for
from terrazzo.graph.rules.windows import windowed
from terrazzo.records import Graph


def heads(graph: Graph) -> list[int]:
    """Nodes that a group may begin with: products, windows and pools."""
    return [
        index
        for index, node in enumerate(graph.nodes)
        if windowed(node, graph) or ((rule := rule_for(node.op)) and rule.makes)
    ]


def ends(graph: Graph) -> list[int]:
    """Nodes behind which a group may end: before each that one may begin with, and the last."""
    return [*(head - 1 for head in heads(graph)[1:] if head > 0), len(graph.nodes) - 1]


def behind_statistics(graph: Graph, end: int) -> int:
    """The last of the statistics that stand right behind an end: those of a norm that a pool went
    ahead of."""
    while end + 1 < len(graph.nodes) and graph.nodes[end + 1].op == "terrazzo.moments":
        end += 1
    return end


def norm_behind(graph: Graph, norms: set[int], end: int) -> int | None:
    """The node before a norm from which an end is reached element by element, if there is one.

    A group may as well end there and the next begin with the norm: what that one needs from the
    others then travels with the statistics.
    """
    index = end
    while index not in norms and graph.nodes[index].op != "terrazzo.normalize":
        node = graph.nodes[index]
        rule = rule_for(node.op)
        maps = [name for name in node.refs if name in graph.producer]
        if len(maps) != 1 or rule is None or rule.makes or windowed(node, graph):
            return None
        index = graph.producer[maps[0]]
    return graph.producer.get(graph.nodes[index].refs[0])


def longest_run(count: int) -> int:
    """How many heads a group may have: longer ones where there are few places to look at."""
    return 6 if count <= 12 else 4 if count <= 40 else 3

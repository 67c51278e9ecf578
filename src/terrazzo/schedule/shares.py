"""How much of a program truly runs split: the answer to "exact by running everything whole"."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.graph.rules import rule_for
from terrazzo.records import Graph
from terrazzo.schedule.program import Combine, Compute, Passes, Program


@dataclass(frozen=True, slots=True)
class SplitShares:
    """Shares, from 0 to 1, of the operators before the last global pool (all, if there is none)."""

    flops: float
    bytes: float


def split_nodes(program: Program) -> set[int]:
    """The indices of the nodes that run split."""
    found: set[int] = set()
    for step in program.steps:
        if isinstance(step, Combine):
            found.add(step.node)
        elif isinstance(step, Compute):
            found |= {apply.node for apply in step.applies if apply.locals is not None}
        elif isinstance(step, Passes):
            found |= set(step.nodes)
    return found


def last_pool(graph: Graph) -> int:
    """The index of the last operator that folds a map into a point, or the number of nodes."""
    found = len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        rule = rule_for(node.op)
        if rule is None or rule.reduce is None or node.op == "terrazzo.moments":
            continue
        source, result = graph.shape(node.refs[0]), graph.shape(node.output)
        is_map = len(source) == 4 and source[-1] * source[-2] > 1
        if is_map and (result[-2:] == (1, 1) or len(result) == 2):
            found = index
    return found


def split_shares(program: Program) -> SplitShares:
    graph, split = program.graph, split_nodes(program)
    counted = range(last_pool(graph))
    flops = {index: graph.nodes[index].flops for index in counted}
    weight = {
        index: sum(graph.values[name].bytes for name in graph.nodes[index].outputs if name)
        for index in counted
    }
    return SplitShares(
        flops=_share(flops, split),
        bytes=_share(weight, split),
    )


def _share(amounts: dict[int, int], split: set[int]) -> float:
    total = sum(amounts.values())
    return (
        sum(amount for index, amount in amounts.items() if index in split) / total if total else 1.0
    )

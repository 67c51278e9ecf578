"""Which arrays carry a gradient, and which of those one backward pass reaches.

Both depend only on the program and on what the caller asks for, so all devices agree on every
message, also a device whose box is empty.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from terrazzo.graph.pooling import TURNING_POOL
from terrazzo.records import Node
from terrazzo.schedule.program import Combine, Compute, Exchange, Passes, Program, Spread, Take

STOPS = frozenset(
    f"aten.{name}.default" for name in "detach zeros_like ones_like full_like empty_like".split()
) | frozenset(f"terrazzo.{name}" for name in "bernoulli rand_like randn_like rand randn".split())
FOLLOWED = {TURNING_POOL: 1}
"""Of these operators a gradient goes back to so many inputs; the others are only looked at."""


def edges(program: Program) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(inputs, outputs) of everything a gradient can pass through, in execution order."""
    found: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for step in program.steps:
        if isinstance(step, (Take, Spread)):
            found.append(((step.source,), (step.target,)))
        elif isinstance(step, Exchange):
            found += [((move.source,), (move.target,)) for move in step.moves]
        elif isinstance(step, Compute):
            found += [
                (_followed(node, apply.inputs), tuple(name for name in apply.outputs if name))
                for apply in step.applies
                if _passes(node := program.graph.nodes[apply.node])
            ]
        elif isinstance(step, Passes):
            found += _chain_edges(program, step)
        elif isinstance(step, Combine) and _passes(program.graph.nodes[step.node]):
            found.append((step.inputs, (step.target,)))
    return found


def _chain_edges(program: Program, step: Passes) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Results inside a chain have no array; they are called by their value and its target."""
    found: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for index, arrays in zip(step.nodes, step.inputs, strict=True):
        node = program.graph.nodes[index]
        inputs = tuple(
            array or f"{step.target}/{name}" for array, name in zip(arrays, node.refs, strict=True)
        )
        last = index == step.nodes[-1]
        if _passes(node):
            target = step.target if last else f"{step.target}/{node.output}"
            found.append((_followed(node, inputs), (target,)))
    return found


def _passes(node: Node) -> bool:
    return node.gradient and node.op not in STOPS


def _followed(node: Node, inputs: Sequence[str]) -> tuple[str, ...]:
    return tuple(inputs[: FOLLOWED.get(node.op)])


def differentiable(program: Program, leaves: Set[str]) -> frozenset[str]:
    """The arrays that depend on these leaves in a way a gradient can follow."""
    found = set(leaves)
    for inputs, outputs in edges(program):
        if any(name in found for name in inputs):
            found |= {name for name in outputs if _floats(program, name)}
    return frozenset(found)


def reached(program: Program, carriers: Set[str], results: Set[str]) -> frozenset[str]:
    """The arrays that these results depend on, among those that carry a gradient."""
    found = set(results) & set(carriers)
    for inputs, outputs in reversed(edges(program)):
        if any(name in found for name in outputs):
            found |= {name for name in inputs if name in carriers}
    return frozenset(found)


def _floats(program: Program, name: str) -> bool:
    value = name.rpartition("/")[2] if "/" in name else program.arrays[name].value
    return program.graph.values[value].is_floating

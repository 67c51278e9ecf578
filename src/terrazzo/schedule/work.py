"""How much arithmetic a device does in one training step, and how much of it more than once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod

from terrazzo.geometry import Box
from terrazzo.graph.rules import Local, rule_for
from terrazzo.records import Graph
from terrazzo.schedule.lifetimes import Lifetimes
from terrazzo.schedule.program import Apply, Compute, Passes, Program
from terrazzo.schedule.training import EVERYTHING, Training


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of forward and backward, and those that passes repeat on top of them."""

    step_flops: int
    repeated_flops: int

    @property
    def times(self) -> float:
        """How many times the arithmetic of a step without passes this is."""
        return 1.0 + self.repeated_flops / self.step_flops if self.step_flops else 1.0


def work(program: Program, device: int, *, training: Training = EVERYTHING) -> Work:
    """One step; a backward pass is twice its forward pass, once where the weights are frozen, and
    none where no gradient flows."""
    step_flops = repeated = 0
    live = training.live(program)
    for step in program.steps:
        if not isinstance(step, (Compute, Passes)):
            continue
        # Where nothing is frozen all count alike, also counters, which have no gradient.
        flows = not training.frozen or any(name in live for name in step.writes)
        if isinstance(step, Compute):
            amounts = [_own(program, apply, device) for apply in step.applies]
            reads = [apply.inputs for apply in step.applies]
        else:
            amounts, reads = _chain(program, step, device), list(step.inputs)
            # The gradient of the convolution that ends a chain needs its input, not its result.
            repeated += sum(amounts[:-1]) if flows else 0
        for amount, arrays in zip(amounts, reads, strict=True):
            step_flops += amount * (1 + _back(program, arrays, live) if flows else 1)
    lives = Lifetimes(program)
    for index in range(len(program.steps)):
        for again in lives.rebuilt(index, live):
            step = program.steps[again]
            assert isinstance(step, Passes)
            repeated += sum(_chain(program, step, device))
    return Work(step_flops, repeated)


def _back(program: Program, arrays: Sequence[str], live: Set[str]) -> int:
    """By input, and by weights if they are trained."""
    weights = [name for name in arrays if name and program.is_parameter(name)]
    return 1 if weights and live.isdisjoint(weights) else 2


def _own(program: Program, apply: Apply, device: int) -> int:
    """The operations of an operator on one device."""
    if apply.locals is None:
        return program.graph.nodes[apply.node].flops
    local = apply.locals[device]
    if local is None:
        return 0
    boxes = program.arrays[apply.outputs[0]].boxes
    assert boxes is not None
    return flops(program.graph, apply.node, local, boxes[device])


def _chain(program: Program, step: Passes, device: int) -> list[int]:
    """The operations of every node of a chain, over all strips."""
    return [
        sum(
            flops(program.graph, node, strip.locals[position], strip.boxes[position])
            for strip in step.strips[device]
        )
        for position, node in enumerate(step.nodes)
    ]


def flops(graph: Graph, index: int, local: Local, box: Box) -> int:
    """The operations of a node for one box of its result.

    A product does its work per position and weight, so that a cut of the channels it makes and a
    cut of those it sums over count alike.
    """
    node, shape = graph.nodes[index], graph.shape(graph.nodes[index].output)
    rule = rule_for(node.op)
    if rule is None or rule.sums is None:
        return node.flops * box.size // max(prod(shape), 1)
    channels = box.rank - 1 if "linear" in node.op else box.rank - 3
    positions = box.size // max(box.shape[channels], 1)
    everywhere = prod(shape) // max(shape[channels], 1)
    weights, all_weights = local.reads[1].box.size, prod(graph.shape(node.refs[1]))
    return node.flops * positions * weights // max(everywhere * all_weights, 1)

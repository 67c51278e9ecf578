"""How much arithmetic a device does in one training step, and how much of it more than once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from terrazzo.geometry import Box
from terrazzo.schedule.lifetimes import Lifetimes
from terrazzo.schedule.program import Compute, Passes, Program


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of forward and backward, and those that passes repeat on top of them."""

    step_flops: int
    repeated_flops: int

    @property
    def times(self) -> float:
        """How many times the arithmetic of a step without passes this is."""
        return 1.0 + self.repeated_flops / self.step_flops if self.step_flops else 1.0


def work(program: Program, device: int) -> Work:
    """One step with all weights trained; a backward pass is twice its forward pass."""
    forward = repeated = 0
    for step in program.steps:
        if isinstance(step, Compute):
            for apply in step.applies:
                boxes = program.arrays[apply.outputs[0]].boxes if apply.outputs[0] else None
                share = boxes[device] if boxes and apply.locals else None
                forward += _flops(program, apply.node, share)
        elif isinstance(step, Passes):
            chain = _chain(program, step, device)
            forward += sum(chain)
            # The gradient of the convolution that ends a chain needs its input, not its result.
            repeated += sum(chain[:-1])
    lives = Lifetimes(program)
    for index in range(len(program.steps)):
        for again in lives.rebuilt_before[index]:
            step = program.steps[again.step]
            assert isinstance(step, Passes)
            repeated += sum(_chain(program, step, device))
    return Work(3 * forward, repeated)


def _chain(program: Program, step: Passes, device: int) -> list[int]:
    """The operations of every node of a chain, over all strips."""
    return [
        sum(_flops(program, node, strip.boxes[position]) for strip in step.strips[device])
        for position, node in enumerate(step.nodes)
    ]


def _flops(program: Program, index: int, box: Box | None) -> int:
    node = program.graph.nodes[index]
    if box is None:
        return node.flops
    return node.flops * box.size // max(prod(program.graph.shape(node.output)), 1)

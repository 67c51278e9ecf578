"""What a step trains, and by which optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UsageError
from terrazzo.records import Graph, Ref
from terrazzo.schedule.gradient import differentiable, reached
from terrazzo.schedule.program import Program

STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors as large as the trained weights that an optimiser keeps."""


@dataclass(frozen=True, slots=True)
class Training:
    """Which parameters a step trains, and by which optimiser.

    Of a frozen parameter no gradient is made, summed or kept, and the optimiser keeps nothing. Nor
    does a gradient go further back than to the first layer that is trained, unless inputs want one.
    """

    optimizer: str = "sgd"
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained, by their names in the model."""
    inputs: bool = False
    """Whether gradients of the inputs are asked for, too."""

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            known = ", ".join(f'"{name}"' for name in STATES)
            raise UsageError(
                f"optimizer={self.optimizer!r}: say one of {known}, the one that keeps as much"
            )

    @property
    def states(self) -> int:
        """How many tensors the optimiser keeps for each one that is trained."""
        return STATES[self.optimizer]

    def weights(self, graph: Graph) -> frozenset[str]:
        """The values of a graph that are trained."""
        return frozenset(
            value.name
            for value in graph.values.values()
            if value.kind == "parameter" and value.is_floating and value.target not in self.frozen
        )

    def live(self, program: Program) -> frozenset[str]:
        """The arrays that gradients go through in a step whose results are all asked for one."""
        graph = program.graph
        given = {n for n in graph.inputs if n and self.inputs and graph.values[n].is_floating}
        carriers = differentiable(program, (self.weights(graph) | given) & set(program.arrays))
        results = {program.outputs[r.name] for r in graph.outputs if isinstance(r, Ref)}
        return reached(program, carriers, results)


EVERYTHING = Training()
"""All weights, by plain descent."""

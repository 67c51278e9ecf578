"""A program: arrays, and the steps that make them, the same list on every device.

An array is a value as the devices hold it: either whole (every device has all of it) or spread
(one box per device; a weight can be cut too, and then lives in boxes). The gradient of an array
follows the step that made it, backwards:

    step      forward                                backward
    Take      a box of an input that was given       summed over devices, if anybody asks
    Exchange  owned boxes -> needed boxes            the adjoint: sent back and added
              owned boxes -> whole (a gather)        each device takes its slice
              parts of a sum -> needed boxes, added  the adjoint: sent back and added
    Arrive    ends an exchange that was only begun   begins its adjoint
    Spread    whole -> used by boxes, no message     the parts are summed
    Combine   one part per device -> whole           passes through
    Compute   operators on what is here              gradients written out, or autograd
    Passes    the same in strips, nothing saved      computed again, strip by strip
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.geometry import Box, Transfer
from terrazzo.graph.rules import Local, Reduction
from terrazzo.records import Graph, Plan


@dataclass(frozen=True, slots=True)
class Array:
    """One value as it is held: ``boxes`` is one box per device, or None when whole."""

    name: str
    value: str
    boxes: tuple[Box, ...] | None = None

    @property
    def is_whole(self) -> bool:
        return self.boxes is None


@dataclass(frozen=True, slots=True)
class Take:
    """Each device takes its box of an input of the call."""

    source: str
    target: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.target,)


@dataclass(frozen=True, slots=True)
class Move:
    """One array laid out anew."""

    source: str
    target: str
    transfers: tuple[Transfer, ...]
    adds: bool = False
    """What arrives is added up: each device held a part of a sum."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Moves that happen together: all messages posted at once."""

    moves: tuple[Move, ...]
    group: int
    ends_later: bool = False
    """It is only begun here: an ``Arrive`` ends it, before the next exchange."""

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(move.source for move in self.moves)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(move.target for move in self.moves)


@dataclass(frozen=True, slots=True)
class Arrive:
    """The end of the exchange before it: from here on all of these arrays is there."""

    targets: tuple[str, ...]
    group: int

    @property
    def reads(self) -> tuple[str, ...]:
        return self.targets

    @property
    def writes(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Spread:
    """An array that devices hold alike, used from here on by each for its own boxes."""

    source: str
    target: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.target,)


@dataclass(frozen=True, slots=True)
class Apply:
    """One operator. ``locals`` says how each device computes its box; None: as exported, whole.

    A device with nothing to compute has None in its place.
    """

    node: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    locals: tuple[Local | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Operators between two messages; one piece of autograd."""

    applies: tuple[Apply, ...]
    group: int

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for apply in self.applies for name in apply.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(name for apply in self.applies for name in apply.outputs if name)


@dataclass(frozen=True, slots=True)
class Strip:
    """One pass: the box of the result, how each node of the chain is computed for it, and what."""

    box: Box
    locals: tuple[Local, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Passes:
    """A chain of operators computed strip by strip, and again in the backward pass.

    ``nodes`` are in order, the last makes the target; ``inputs`` names the array behind each
    reference of each node ("" for a result inside the chain); ``strips`` are per device.
    """

    nodes: tuple[int, ...]
    inputs: tuple[tuple[str, ...], ...]
    target: str
    strips: tuple[tuple[Strip, ...], ...]
    group: int

    @property
    def reads(self) -> tuple[str, ...]:
        """The arrays it reads, each once."""
        return tuple(dict.fromkeys(name for names in self.inputs for name in names if name))

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.target,)


@dataclass(frozen=True, slots=True)
class Combine:
    """One part per device, of the elements it owns, made into a result all devices hold.

    ``parts`` is how each device computes its part (None: it owns nothing), ``places`` where that
    part lies in the whole.
    """

    node: int
    inputs: tuple[str, ...]
    target: str
    parts: tuple[Local | None, ...]
    places: tuple[Box, ...]
    reduction: Reduction
    group: int

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.target,)


Step = Take | Exchange | Arrive | Spread | Compute | Passes | Combine


@dataclass(frozen=True)
class Program:
    """All steps of one call, and the arrays they name."""

    graph: Graph
    plan: Plan
    arrays: Mapping[str, Array]
    steps: tuple[Step, ...]
    outputs: Mapping[str, str]
    """The whole array that holds a value the caller gets back (an output or a buffer)."""
    given: Mapping[str, tuple[Box, ...]]
    """For each image input the box each device must be given."""
    homes: Mapping[str, tuple[Box, ...]]
    """For each cut parameter the box that lives on each device."""

    @property
    def devices(self) -> int:
        return self.plan.devices

    def is_parameter(self, array: str) -> bool:
        """Whether an array is a parameter of the model, as it is or spread."""
        return self.graph.values[self.arrays[array].value].kind == "parameter"

    def is_leaf(self, array: str) -> bool:
        """Whether an array lies in memory of the caller's: an input of the call, or the model's."""
        return self.graph.values[self.arrays[array].value].kind != "node"

"""A ledger of memory: what is held at the moment, and the largest sum so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

HEAP_BYTES = 32 << 20
"""Larger blocks get pages of their own, which are returned when they are freed."""
MAP_HOLES, WEIGHT_HOLES = 6, 2.25
"""What lies free between blocks in use, where the allocator is left alone: a new map does not fit
into what a smaller one left, so there are holes as large as the largest few maps, and a few as the
largest weight that is copied (docs/log.md)."""
WASTE, WEIGHTS_WASTE = 0.3, 0.15
"""Where free pages are returned in time (plans with passes) holes are small and many: a part of
maps in use, and of weights with their gradients."""
STRIPS_BYTES, STRIPS_WEIGHTS = 5 << 20, 2
"""What a convolution with windows makes on the way: of maps, strip by strip, in kernels' own
orders, and of its weights, turned or in sums that are added up, so many times what they are."""
LIBRARY_BYTES, OPERATOR_BYTES = 6 << 20, 32 << 10
"""What a net is made of besides tensors, and what torch's kernels keep once they have run: code
that is made for each shape they meet, so each operator of the net adds to it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most that a training step takes on one device, and what it is made of at that moment.

    Without the process itself, and what a loss outside of the net needs.
    """

    weights_bytes: int = 0
    weight_gradients_bytes: int = 0
    maps_bytes: int = 0
    map_gradients_bytes: int = 0
    working_bytes: int = 0
    where: str = ""
    kept_bytes: int = 0
    """Maps that wait between the forward and the backward pass."""
    tidy: bool = False
    """Whether free pages are returned in time."""
    operators: int = 0
    map_holes_bytes: int = 0
    """The largest maps that come from the heap, together."""
    largest_weight_bytes: int = 0
    """Of convolutions, which copy theirs."""
    strips_bytes: int = 0
    states_bytes: int = 0
    """What the optimiser keeps of the trained weights, from its first step on."""

    @property
    def used_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.weight_gradients_bytes
            + self.maps_bytes
            + self.map_gradients_bytes
            + self.working_bytes
            + self.states_bytes
        )

    @property
    def total_bytes(self) -> int:
        """With what the allocator wastes."""
        if not self.tidy:
            holes_bytes = self.map_holes_bytes + int(WEIGHT_HOLES * self.largest_weight_bytes)
            return self.used_bytes + holes_bytes + self.library_bytes
        lasting_bytes = self.weights_bytes + self.weight_gradients_bytes
        moving_bytes = self.used_bytes - self.states_bytes - lasting_bytes
        idle_bytes = WASTE * moving_bytes + WEIGHTS_WASTE * lasting_bytes
        return self.used_bytes + int(idle_bytes) + self.library_bytes

    @property
    def library_bytes(self) -> int:
        return LIBRARY_BYTES + OPERATOR_BYTES * self.operators + self.strips_bytes


class Ledger:
    """What is held at the moment, and the largest sum so far."""

    def __init__(self, start: Footprint) -> None:
        self.peak = self._start = start
        self._most_bytes = start.used_bytes
        self.maps_bytes = 0
        self._map_gradients_bytes = self._weight_gradients_bytes = 0
        self._sizes: dict[str, int] = {}
        self._holders: Counter[str] = Counter()
        self._flows: dict[str, int] = {}
        self._earned: set[str] = set()

    def hold(self, name: str, size: int) -> None:
        """One more holder; memory is taken by the first."""
        if not self._holders[name]:
            self._sizes[name] = size
            self.maps_bytes += size
        self._holders[name] += 1

    def drop(self, name: str) -> None:
        self._holders[name] -= 1
        if not self._holders[name]:
            self.maps_bytes -= self._sizes[name]

    def flow(self, name: str, size: int) -> None:
        """A gradient arrives; a second one is added to the first."""
        if name not in self._flows:
            self._flows[name] = size
            self._map_gradients_bytes += size

    def consume(self, name: str) -> None:
        self._map_gradients_bytes -= self._flows.pop(name, 0)

    def earn(self, name: str, size: int) -> None:
        """The gradient of a weight, which stays until the optimiser has used it."""
        if name not in self._earned:
            self._earned.add(name)
            self._weight_gradients_bytes += size

    def note(self, where: str, working: int = 0) -> None:
        """This is a moment at which so much more is in use."""
        growing_bytes = self.maps_bytes + self._map_gradients_bytes + self._weight_gradients_bytes
        used_bytes = self._start.used_bytes + growing_bytes + working
        if used_bytes > self._most_bytes:
            self._most_bytes = used_bytes
            self.peak = replace(
                self._start,
                weight_gradients_bytes=self._weight_gradients_bytes,
                maps_bytes=self.maps_bytes,
                map_gradients_bytes=self._map_gradients_bytes,
                working_bytes=working,
                where=where,
            )

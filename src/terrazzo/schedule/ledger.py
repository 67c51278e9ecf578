"""A ledger of memory: what is held at the moment, and the largest sum so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

HEAP_BYTES = 32 << 20
"""Larger blocks get pages of their own, which are returned when they are freed."""
HOLES = 0.58
"""What lies free between blocks in use, where the allocator is left alone: such a part of what
comes and goes in a step, because small blocks that stay keep what large ones left apart."""
IDLE, BETWEEN, BETWEEN_BYTES = 0.17, 2.5, 22 << 20
"""Where free pages are returned in time (plans with passes), such a part of what comes and goes may
lie idle whenever somebody looks. Between two looks so many maps are made, or as much of larger
ones."""
LIBRARY_BYTES, OPERATOR_BYTES = 5 << 20, 24 << 10
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
    largest_map_bytes: int = 0
    apart_bytes: int = 0
    """Of what comes and goes, in blocks with pages of their own: they leave no holes."""
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
    def passing_bytes(self) -> int:
        """What comes and goes in a step."""
        return self.used_bytes - self.weights_bytes - self.states_bytes

    @property
    def idle_bytes(self) -> int:
        """What the allocator holds and nobody uses."""
        holes_bytes = int(HOLES * (self.passing_bytes - self.apart_bytes))
        if not self.tidy:
            return holes_bytes
        between_bytes = min(int(BETWEEN * self.largest_map_bytes), BETWEEN_BYTES)
        return min(holes_bytes, int(IDLE * self.passing_bytes) + between_bytes)

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.idle_bytes + self.library_bytes

    @property
    def library_bytes(self) -> int:
        return LIBRARY_BYTES + OPERATOR_BYTES * self.operators


class Ledger:
    """What is held at the moment, and the largest sum so far."""

    def __init__(self, start: Footprint) -> None:
        self.peak = self._start = start
        self._most_bytes = start.used_bytes
        self.maps_bytes = 0
        self._map_gradients_bytes = self._weight_gradients_bytes = self._apart_bytes = 0
        self._sizes: dict[str, int] = {}
        self._holders: Counter[str] = Counter()
        self._flows: dict[str, int] = {}
        self._earned: set[str] = set()

    def hold(self, name: str, size: int) -> None:
        """One more holder; memory is taken by the first."""
        if not self._holders[name]:
            self._sizes[name] = size
            self.maps_bytes += size
            self._apart_bytes += _apart(size)
        self._holders[name] += 1

    def drop(self, name: str) -> None:
        self._holders[name] -= 1
        if not self._holders[name]:
            self.maps_bytes -= self._sizes[name]
            self._apart_bytes -= _apart(self._sizes[name])

    def flow(self, name: str, size: int) -> None:
        """A gradient arrives; a second one is added to the first."""
        if name not in self._flows:
            self._flows[name] = size
            self._map_gradients_bytes += size
            self._apart_bytes += _apart(size)

    def consume(self, name: str) -> None:
        size = self._flows.pop(name, 0)
        self._map_gradients_bytes -= size
        self._apart_bytes -= _apart(size)

    def earn(self, name: str, size: int) -> None:
        """The gradient of a weight, which stays until the optimiser has used it."""
        if name not in self._earned:
            self._earned.add(name)
            self._weight_gradients_bytes += size
            self._apart_bytes += _apart(size)

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
                apart_bytes=self._apart_bytes,
                where=where,
            )


def _apart(size: int) -> int:
    return size if size >= HEAP_BYTES else 0

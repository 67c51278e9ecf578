"""Stock: what a net holds of all its data sets, which together have one budget.

Several feeds of one data set (training and a test of it, or a new loader for each epoch) share what
is held. Where memory gets short, sets that are not being read give theirs back first. What is held
of one set is bounded by its own ``cache=``, and all together by the largest of them.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from terrazzo.feed.arbiter import Memory, room_bytes
from terrazzo.feed.arena import Arena
from terrazzo.feed.guard import Guard
from terrazzo.feed.held import Held
from terrazzo.feed.stamps import Stamps

SLACK = 0.05
"""Where memory is not short, limits follow only changes of more than this share."""
MARGIN_BYTES = 8 << 20
"""So much more than is missing is given back: what grows will grow on."""
ANY_BYTES = 1 << 62


class Stock:
    """One for each net."""

    def __init__(self) -> None:
        self._helds: weakref.WeakSet[Held] = weakref.WeakSet()
        self._guard = Guard()
        self._known: dict[tuple[int, int | None], tuple[Any, Held]] = {}
        self._stamps: dict[int, tuple[Any, Stamps]] = {}

    def held_of(self, dataset: Any, *, asked_bytes: int | None, seed: int, device: int) -> Held:
        """What is held of a data set; it lives as long as the set, and who reads it."""
        key = (id(dataset), asked_bytes)
        found = self._known.get(key)
        if found is not None and found[0]() is dataset:
            return found[1]
        memory = Memory.here()
        room = memory.ceiling_bytes if asked_bytes is None else asked_bytes
        held = Held(
            Arena(room), seed=seed, samples=len(dataset), device=device, asked_bytes=asked_bytes
        )
        weakref.finalize(held, held.arena.close)
        self._helds.add(held)
        held.arena.give_back(self._room(held, memory))
        self._guard.watch(held.arena)
        known = self._known
        try:
            gone = weakref.ref(dataset, lambda _: known.pop(key, None))
        except TypeError:  # of some kinds of objects nobody is told when they go
            return held
        known[key] = (gone, held)
        return held

    def stamps_of(self, dataset: Any) -> Stamps:
        """What the files of a data set were; all who read it share them."""
        key = id(dataset)
        found = self._stamps.get(key)
        if found is not None and found[0]() is dataset:
            return found[1]
        try:
            samples = len(dataset)
        except Exception:  # streams have no length, or refuse to tell it
            samples = None
        stamps, known = Stamps(samples), self._stamps
        with suppress(TypeError):  # of some kinds of objects nobody is told when they go
            known[key] = (weakref.ref(dataset, lambda _: known.pop(key, None)), stamps)
        return stamps

    @property
    def held_bytes(self) -> int:
        return sum(held.held_bytes for held in self._helds)

    def mind(self, active: Held) -> int:
        """Gives memory back before the next step needs it; 0: nothing had to be."""
        memory, before, given = Memory.here(), self.held_bytes, 0
        for held in self._helds:
            given += held.note_cut()
        is_short = not room_bytes(memory, held_bytes=0, asked_bytes=ANY_BYTES)
        whole = self._whole(memory)
        over = before - whole
        if over > (0 if is_short else SLACK * whole):
            given += self._give_back(over + MARGIN_BYTES, last=active)
        room, limit = self._room(active, memory), active.arena.limit_bytes
        if abs(room - limit) > SLACK * limit:
            active.arena.allow(room)
        return given

    def _give_back(self, missing: int, *, last: Held) -> int:
        """So many bytes, if there are so many; workers may go on filling what has room."""
        given = 0
        for held in sorted(self._helds, key=lambda held: held is last):
            before = held.held_bytes
            if given < missing and before:
                keep = max(before - (missing - given), 0)
                held.give_back(keep)
                given += before - keep
        return given

    def _whole(self, memory: Memory) -> int:
        """What all may hold together."""
        before = self.held_bytes
        return max(
            room_bytes(memory, held_bytes=before, asked_bytes=held.asked_bytes)
            for held in self._helds
        )

    def _room(self, held: Held, memory: Memory) -> int:
        """What one may hold beside the others."""
        others = self.held_bytes - held.held_bytes
        most = ANY_BYTES if held.asked_bytes is None else held.asked_bytes
        return max(min(self._whole(memory) - others, most), 0)

"""Held: which samples stay in memory, a fixed part of the set that is chosen by a seed.

In random order, once an epoch, no sample is more likely to be wanted than another: a cache that
replaces loses what it will need, and one that never does saves exactly its share of each epoch.
Each sample has a number between 0 and 1 made of the seed, and is held if that is below a threshold.
Who is to hold it follows from the same numbers; what is written down is only who really does.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from terrazzo.feed.arena import OFFSET_BITS, Arena
from terrazzo.feed.draws import SPAN, mix, word_of
from terrazzo.feed.form import DECODED, ENCODED
from terrazzo.feed.ledger import Ledger
from terrazzo.feed.pantry import Address
from terrazzo.feed.peers import owner_of
from terrazzo.feed.task import Made, Place, Shelved

WEIGHED = 16
"""So many samples are weighed in both forms before one is chosen."""
AT_MOST = 128
"""If none of so many could be weighed, holding is given up."""
LATEST = 256
"""Of so many samples the seconds are kept that holding them saves."""
SURE = 2.0
"""So many times as much is chosen as fits by what is known of sizes, of sixteen samples at first:
what is too much finds no room, and what is too little would be read in each epoch."""
FULL_AFTER = 4
"""Another device that has had no room so often is offered nothing more in this epoch."""
KEY_BYTES = 32


def chance_of(seed: int, index: Any) -> float:
    """The number of a sample, between 0 and 1."""
    return mix(seed, word_of(index)) / SPAN


def choose_form(
    sizes: dict[str, tuple[float, float]], *, samples: int, room_bytes: int
) -> str | None:
    """The form that saves the most seconds of an epoch; None: neither saves any.

    ``sizes``: for each form the mean bytes of a sample, and the seconds that holding it saves.
    """
    best, most_s = None, 0.0
    for form, (size, saves_s) in sorted(sizes.items(), key=lambda row: row[1][0]):
        share = min(room_bytes / max(size * samples, 1.0), 1.0)
        if share * saves_s > most_s * 1.05:  # the smaller form, unless the other is worth it
            best, most_s = form, share * saves_s
    return best


@dataclass
class Weight:
    """What samples of one form take, and what holding them saves."""

    count: int = 0
    total_bytes: int = 0
    least_bytes: float = inf
    saved_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    def add(self, size_bytes: int, saves_s: float) -> None:
        self.count += 1
        self.total_bytes += size_bytes
        self.least_bytes = min(self.least_bytes, size_bytes)
        self.saved_s.append(saves_s)

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.count


class Places(Ledger):
    """Where samples lie in the arena: the number of the place, its beginning, its size."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, 3)

    def find(self, index: Any) -> tuple[int, int] | None:
        """Place and size of a sample."""
        row = self.get(index)
        return None if row is None else (row[0] << OFFSET_BITS | row[1], row[2])

    def lay(self, index: Any, place: int, size: int) -> None:
        at = place & ((1 << OFFSET_BITS) - 1)
        self.put(index, (place >> OFFSET_BITS, at, size))

    def keep(self, arena: Arena) -> None:
        """Only those that are still there."""
        for index in self:
            if not arena.has(*(self.find(index) or (0, 0))):
                self.drop(index)


class Held:
    """What one device holds of a data set, and what others hold for it."""

    def __init__(
        self,
        arena: Arena,
        *,
        seed: int,
        samples: int,
        device: int = 0,
        asked_bytes: int | None = None,
    ) -> None:
        self.arena, self.seed, self.samples, self.device = arena, seed, samples, device
        self.asked_bytes = asked_bytes
        """What it may take by the user's word; None: it is found out."""
        self.key = secrets.token_bytes(KEY_BYTES)
        """Of the marks on what other devices hold, and of the shelf where it lies there."""
        self.like: int | None = None
        """Of the data set when something was held of it last (``likeness``)."""
        self.places = Places(samples)
        self.form = ""
        self.threshold = 0.0
        self.decodes = True
        """Whether decoded samples are the same in every epoch, so that they can be held."""
        self.is_useless = False
        """Whether it was found that holding saves nothing, or cannot be done."""
        self.peers: dict[int, Address] = {}
        """Other devices with memory to spare, by their numbers."""
        self.liars: set[int] = set()
        """Devices that have given something else than they had been given."""
        self.given = Ledger(samples, 1)
        """Who has taken which sample, as its number and one."""
        self._full = Counter[int]()
        self._weights: dict[str, Weight] = {}
        self._weighed = self._stale_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.arena.used_bytes

    @property
    def too_large_bytes(self) -> int:
        """What a sample takes where not one finds room; 0: some do, or it is not known."""
        weight = self._weights.get(self.form)
        if weight is None or self.places or self.peers:
            return 0
        return int(weight.mean_bytes) if weight.mean_bytes > self.arena.limit_bytes else 0

    # ---- what to do with a batch -----------------------------------------------------------

    def shelved(self, indices: Iterable[Any]) -> Shelved:
        """What is known of the samples of a batch."""
        found = Shelved(key=self.key)
        keeps, rooms = not self.is_useless and self._has_room, self._rooms()
        for index in indices:
            place = self.places.find(index)
            if place is not None:
                found.held[index] = Place(*place, self.form)
                continue
            taken = self.given.get(index)
            if taken is not None and taken[0] - 1 in self.peers:
                found.away[index] = self.peers[taken[0] - 1]
                continue
            if not self.form:
                if keeps:
                    found.keep[index] = ""
                continue
            owner = self._owner(index, rooms)
            if owner == self.device and keeps:
                found.keep[index] = self.form
            elif owner in self.peers and self._full[owner] < FULL_AFTER:
                found.give[index] = self.peers[owner]
        if not self.form:
            self._weighed += len(found.keep)
            self.is_useless = not self._weights and self._weighed > AT_MOST
        return found

    @property
    def _has_room(self) -> bool:
        """Whether another sample may fit; small ones do when most do not any more."""
        weight = self._weights.get(self.form)
        least = 0.0 if weight is None else weight.least_bytes
        return self.arena.limit_bytes > 0 and self.arena.free_bytes >= least

    def _owner(self, index: Any, rooms: list[tuple[int, int]]) -> int | None:
        """The device that is to hold a sample; None: nobody."""
        if chance_of(self.seed, index) >= self.threshold:
            return None
        if not self.peers:
            return self.device
        return owner_of(self.seed, index, rooms) if type(index) is int else None

    def _rooms(self) -> list[tuple[int, int]]:
        others = [(device, peer.room_bytes) for device, peer in self.peers.items()]
        return [(self.device, self.arena.limit_bytes), *others]

    # ---- what became of it -----------------------------------------------------------------

    def note(self, made: Made) -> None:
        """What was learnt from a batch."""
        if made.key != self.key:  # it was made of a data set that has changed since
            return
        for index, place in made.kept.items():
            if place.form == self.form and self.arena.has(place.place, place.size):
                self.places.lay(index, place.place, place.size)
        for index in made.missed:
            self.given.drop(index)
        for index, device in made.given.items():
            self.given.put(index, (device + 1,))
        self._full.update(made.refused)
        if made.liars - self.liars:
            self.liars |= made.liars
            self.share(self.peers.values())
        for index in made.stale:
            self._lose(index)
        if made.draws and self.decodes:
            self.only_encoded()
        for form, size, saves_s in made.sizes:
            if form == ENCODED or self.decodes:
                self._weights.setdefault(form, Weight()).add(size, saves_s)
        if not self.form and any(one.count >= WEIGHED for one in self._weights.values()):
            self._choose()

    def _lose(self, index: Any) -> None:
        """Its bytes are of no use any more; too many such, and all begins anew."""
        place = self.places.find(index)
        if place is not None:
            self._stale_bytes += place[1]
            self.places.drop(index)
        self.given.drop(index)
        if 2 * self._stale_bytes > self.held_bytes:
            self.forget()

    def share(self, peers: Iterable[Address]) -> None:
        """Others hold a part, too: files, because only the reader need know how to decode them."""
        found = {peer.device: peer for peer in peers if peer.device not in self.liars}
        if found == self.peers:
            return
        self.peers = found
        self._full.clear()
        if found and self.form != ENCODED:
            self.only_encoded()
            self.form, self.threshold = ENCODED, 1.0

    def means(self) -> dict[str, tuple[float, float]]:
        """For each form the mean bytes of a sample, and the seconds that holding one saves."""
        return {
            form: (weight.mean_bytes, median(weight.saved_s))
            for form, weight in self._weights.items()
        }

    def _choose(self) -> None:
        means, room = self.means(), self.arena.limit_bytes
        found = choose_form(means, samples=self.samples, room_bytes=room)
        if found is None:
            self.is_useless = True
            return
        self.form = found
        self.threshold = SURE * room / max(means[found][0] * self.samples, 1.0)

    def widen(self) -> None:
        """At the end of an epoch sizes are known better; what is left of the room is used."""
        self._full.clear()
        if self.form not in self._weights:
            return
        mean, room = self._weights[self.form].mean_bytes, sum(room for _, room in self._rooms())
        self.threshold = max(self.threshold, SURE * room / max(mean * self.samples, 1.0))

    # ---- what goes -------------------------------------------------------------------------

    def give_back(self, keep_bytes: int) -> None:
        self.arena.give_back(keep_bytes)
        self.places.keep(self.arena)

    def note_cut(self) -> int:
        """Samples may have gone while a step needed their memory: how many."""
        if not self.arena.was_cut:
            return 0
        before = len(self.places)
        self.places.keep(self.arena)
        return before - len(self.places)

    def forget(self) -> None:
        """Nothing of it counts any more, here or elsewhere."""
        self.arena.empty()
        self.places.clear()
        self.given.clear()
        self._weights.clear()
        self._stale_bytes = 0
        self.key = secrets.token_bytes(KEY_BYTES)
        self.form, self.threshold = (ENCODED, 1.0) if self.peers else ("", 0.0)

    def renew(self, *, in_two_steps: bool) -> None:
        """The data set has changed. Files have not: they are known by their names and times."""
        if in_two_steps or self.form != ENCODED:
            self.forget()

    def only_encoded(self) -> None:
        """Samples draw random numbers: their decoded form is another in each epoch."""
        self.decodes = False
        self._weights.pop(DECODED, None)
        if self.form == DECODED:
            self.forget()

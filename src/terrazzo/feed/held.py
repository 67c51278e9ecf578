"""Held: which samples stay in memory, a fixed part of the set that is chosen by a seed.

In random order, once an epoch, no sample is more likely to be wanted than another: a cache that
replaces loses what it will need, and one that never does saves exactly its share of each epoch.
Each sample has a number between 0 and 1 made of the seed, and is held if that is below a threshold:
no list of who holds what is needed, here or on other devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from terrazzo.feed.arena import Arena
from terrazzo.feed.draws import mix, word_of
from terrazzo.feed.form import DECODED, ENCODED
from terrazzo.feed.maker import Made, Place
from terrazzo.feed.pantry import Address
from terrazzo.feed.peers import owner_of

WEIGHED = 16
"""So many samples are weighed in both forms before one is chosen."""
AT_MOST = 128
"""If none of so many could be weighed, holding is given up."""
SPAN = float(1 << 63)


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
    for form, (size, saves_s) in sorted(sizes.items()):
        share = min(room_bytes / max(size * samples, 1.0), 1.0)
        if share * saves_s > most_s * 1.05:  # the smaller form, unless the other is worth it
            best, most_s = form, share * saves_s
    return best


class Held:
    """What one device holds of a data set, and what others hold for it."""

    def __init__(self, arena: Arena, *, seed: int, samples: int, device: int = 0) -> None:
        self.arena, self.seed, self.samples, self.device = arena, seed, samples, device
        self.places: dict[Any, Place] = {}
        self.form = ""
        self.threshold = 0.0
        self.decodes = True
        """Whether decoded samples are the same in every epoch, so that they can be held."""
        self.is_useless = False
        """Whether it was found that holding saves nothing, or cannot be done."""
        self.peers: dict[int, Address] = {}
        """Other devices with memory to spare, by their numbers."""
        self.given: dict[Any, int] = {}
        """Who has taken which sample."""
        self._sizes: dict[str, list[tuple[int, float]]] = {}
        self._weighed = 0

    @property
    def held_bytes(self) -> int:
        return self.arena.used_bytes

    # ---- what to do with a batch -----------------------------------------------------------

    def wanted(self, indices: Iterable[Any]) -> dict[Any, str]:
        """Samples that are to be put into memory when they are made."""
        if self.is_useless or self.arena.limit_bytes <= 0:
            return {}
        if not self.form:
            found = dict.fromkeys(indices, "")
            self._weighed += len(found)
            self.is_useless = not self._sizes and self._weighed > AT_MOST
            return found
        return {
            index: self.form
            for index in indices
            if index not in self.places and self._owner(index) == self.device
        }

    def away(self, indices: Iterable[Any]) -> dict[Any, Address]:
        """Samples that other devices hold."""
        if not self.given:
            return {}
        found = {}
        for index in indices:
            address = self.peers.get(self.given.get(index, -1))
            if address is not None:
                found[index] = address
        return found

    def to_give(self, indices: Iterable[Any]) -> dict[Any, Address]:
        """Samples that other devices are to hold, once they are read."""
        if not self.peers:
            return {}
        owners = {index: self._owner(index) for index in indices}
        return {
            index: self.peers[owner]
            for index, owner in owners.items()
            if owner is not None and owner in self.peers and self.given.get(index) != owner
        }

    def _owner(self, index: Any) -> int | None:
        """The device that is to hold a sample; None: nobody."""
        if chance_of(self.seed, index) >= self.threshold:
            return None
        if not self.peers:
            return self.device
        return owner_of(self.seed, index, self._rooms()) if isinstance(index, int) else None

    def _rooms(self) -> list[tuple[int, int]]:
        others = [(device, peer.room_bytes) for device, peer in self.peers.items()]
        return [(self.device, self.arena.limit_bytes), *others]

    # ---- what became of it -----------------------------------------------------------------

    def note(self, made: Made) -> None:
        """What was learnt from a batch."""
        for index, place in made.kept.items():
            if place.form == self.form and self.arena.has(place.place, place.size):
                self.places[index] = place
        for index in made.missed:
            self.given.pop(index, None)
        self.given.update(made.given)
        if made.draws and self.decodes:
            self.only_encoded()
        for form, size, saves_s in made.sizes:
            if form == ENCODED or self.decodes:
                self._sizes.setdefault(form, []).append((size, saves_s))
        if not self.form and len(next(iter(self._sizes.values()), ())) >= WEIGHED:
            self._choose()

    def share(self, peers: Iterable[Address]) -> None:
        """Others hold a part, too: files, because only the reader need know how to decode them."""
        found = {peer.device: peer for peer in peers}
        if found == self.peers:
            return
        self.peers = found
        if found and self.form != ENCODED:
            self.only_encoded()
            self.form, self.threshold = ENCODED, 1.0

    def means(self) -> dict[str, tuple[float, float]]:
        """For each form the mean bytes of a sample, and the seconds that holding one saves."""
        return {
            form: (
                sum(size for size, _ in rows) / len(rows),
                sorted(saves for _, saves in rows)[len(rows) // 2],
            )
            for form, rows in self._sizes.items()
        }

    def _choose(self) -> None:
        means, room = self.means(), self.arena.limit_bytes
        found = choose_form(means, samples=self.samples, room_bytes=room)
        if found is None:
            self.is_useless = True
            return
        self.form = found
        self.threshold = room / max(means[found][0] * self.samples, 1.0)

    def widen(self) -> None:
        """At the end of an epoch sizes are known better; what is left of the room is used."""
        if self.form not in self._sizes:
            return
        mean, room = self.means()[self.form][0], sum(room for _, room in self._rooms())
        self.threshold = max(self.threshold, room / max(mean * self.samples, 1.0))

    def give_back(self, keep_bytes: int) -> None:
        self.arena.give_back(keep_bytes)
        self.places = {
            index: place
            for index, place in self.places.items()
            if self.arena.has(place.place, place.size)
        }

    def forget(self) -> None:
        """The data set has changed."""
        self.give_back(0)
        self.arena.allow(self.arena.room_bytes)
        self.places.clear()
        self.given.clear()
        self._sizes.clear()
        self.form, self.threshold = (ENCODED, 1.0) if self.peers else ("", 0.0)

    def only_encoded(self) -> None:
        """Samples draw random numbers: their decoded form is another in each epoch."""
        self.decodes = False
        self._sizes.pop(DECODED, None)
        if self.form == DECODED:
            self.forget()

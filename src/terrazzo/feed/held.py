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
from terrazzo.feed.draws import mix
from terrazzo.feed.form import DECODED, ENCODED
from terrazzo.feed.maker import Made, Place

WEIGHED = 16
"""So many samples are weighed in both forms before one is chosen."""
SPAN = float(1 << 63)


def chance_of(seed: int, index: Any) -> float:
    """The number of a sample, between 0 and 1."""
    word = index if isinstance(index, int) else mix(*str(index).encode())
    return mix(seed, word) / SPAN


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
    """What one device holds of a data set."""

    def __init__(self, arena: Arena, *, seed: int, samples: int) -> None:
        self.arena, self.seed, self.samples = arena, seed, samples
        self.places: dict[Any, Place] = {}
        self.form = ""
        self.threshold = 0.0
        self.decodes = True
        """Whether decoded samples are the same in every epoch, so that they can be held."""
        self._sizes: dict[str, list[tuple[int, float]]] = {}

    @property
    def held_bytes(self) -> int:
        return self.arena.used_bytes

    def wanted(self, indices: Iterable[Any]) -> dict[Any, str]:
        """Samples that are to be put into memory when they are made."""
        if not self.form:
            return {} if self.arena.limit_bytes <= 0 else dict.fromkeys(indices, "")
        return {
            index: self.form
            for index in indices
            if index not in self.places and chance_of(self.seed, index) < self.threshold
        }

    def note(self, made: Made) -> None:
        """What was learnt from a batch."""
        for index, place in made.kept.items():
            if place.form == self.form and place.place + place.size <= self.arena.limit_end:
                self.places[index] = place
        if made.draws and self.decodes:
            self.only_encoded()
        for form, size, saves_s in made.sizes:
            if form == ENCODED or self.decodes:
                self._sizes.setdefault(form, []).append((size, saves_s))
        if not self.form and len(next(iter(self._sizes.values()), ())) >= WEIGHED:
            self._choose()

    def means(self) -> dict[str, tuple[float, float]]:
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
            self.arena.give_back(0)
            self._sizes.clear()
            return
        self.form = found
        self.threshold = room / max(means[found][0] * self.samples, 1.0)

    def widen(self) -> None:
        """At the end of an epoch sizes are known better; what is left of the room is used."""
        if not self.form or not self.places or self.threshold >= 1.0:
            return
        mean = self.arena.used_bytes / len(self.places)
        self.threshold = max(self.threshold, self.arena.limit_bytes / max(mean * self.samples, 1.0))

    def give_back(self, keep_bytes: int) -> None:
        end = self.arena.give_back(keep_bytes)
        self.places = {
            index: place for index, place in self.places.items() if place.place + place.size <= end
        }

    def forget(self) -> None:
        """The data set has changed."""
        self.give_back(0)
        self.arena.allow(self.arena.room_bytes)
        self.places.clear()
        self._sizes.clear()
        self.form, self.threshold = "", 0.0

    def only_encoded(self) -> None:
        """Samples draw random numbers: their decoded form is another in each epoch."""
        self.decodes = False
        self._sizes.pop(DECODED, None)
        if self.form == DECODED:
            self.forget()

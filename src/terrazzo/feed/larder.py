"""Larder: what one source holds, of the stock of its net and with other devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from terrazzo.feed.arbiter import MEMORY_EVERY_S
from terrazzo.feed.held import Held
from terrazzo.feed.likeness import likeness
from terrazzo.feed.process import CAN_FORK
from terrazzo.feed.sharing import Offers
from terrazzo.feed.stock import Stock
from terrazzo.feed.tally import say
from terrazzo.feed.task import Made, Recipe, Shelved
from terrazzo.records.stage import HELD
from terrazzo.records.units import bytes_text
from terrazzo.runtime.recorder import Recorder


class Larder:
    """Empty until it is opened."""

    def __init__(
        self, recipe: Recipe, *, asked_bytes: int | None, offers: Offers | None, stock: Stock
    ) -> None:
        self.recipe, self.asked_bytes = recipe, asked_bytes
        self.offers, self.stock = offers, stock
        self.held: Held | None = None
        self._checked = 0.0
        self._is_short = self._has_told_useless = False
        self._liars: set[int] = set()

    @property
    def can_be(self) -> bool:
        """Whether samples can be held, and nobody said that they should not."""
        recipe = self.recipe
        has_length = hasattr(recipe.dataset, "__len__")
        return bool(self.asked_bytes != 0 and CAN_FORK and recipe.by_sample and has_length)

    def open(self) -> Held:
        """From now on samples are held."""
        device = 0 if self.offers is None else self.offers.device
        self.held = self.stock.held_of(
            self.recipe.dataset,
            asked_bytes=self.asked_bytes,
            seed=self.recipe.seed or 0,
            device=device,
        )
        self.renew()
        if self.offers is not None:
            self.offers.wait()
        self.share()
        return self.held

    def renew(self) -> None:
        """The data set may have changed since something was held of it."""
        held, now = self.held, likeness(self.recipe.dataset)
        if self.recipe.stamps is not None:
            self.recipe.stamps.begin(now)
        if held is None or held.like == now:
            return
        if held.like is not None:
            held.renew(in_two_steps=self.recipe.in_two_steps)
        held.like = now

    def look(self) -> None:
        """When an epoch begins, or workers start: with the set a script may have changed files."""
        if self.recipe.stamps is not None:
            self.recipe.stamps.begin(likeness(self.recipe.dataset))

    def look_back(self) -> None:
        """At its end, or in the middle of it: what is another one now has changed by reading."""
        if self.recipe.stamps is not None:
            self.recipe.stamps.end(likeness(self.recipe.dataset))

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An epoch that is read in this process."""
        self.look()
        try:
            yield from batches
        finally:
            self.look_back()

    def share(self) -> None:
        """Looks who holds samples for this device; some may be gone, or have come."""
        if self.held is not None and self.offers is not None:
            self.held.share(self.offers())

    def shelved(self, indices: Any) -> Shelved:
        return Shelved() if self.held is None else self.held.shelved(indices)

    def note(self, made: Made) -> None:
        """What was learnt about samples that are held."""
        if self.held is None:
            return
        self.held.note(made)
        for device in self.held.liars - self._liars:
            self._liars.add(device)
            say(
                f"device {device} gave something else than it had been given to hold: its answers "
                "are not used any more"
            )

    def mind_memory(self, recorder: Recorder | None) -> None:
        """Gives memory back before the next step needs it."""
        now = time.monotonic()
        if self.held is None or now - self._checked < MEMORY_EVERY_S:
            return
        self._checked = now
        self.share()
        if not self.stock.mind(self.held):
            return
        if recorder is not None:
            recorder.note(HELD, held_bytes=float(self.held.held_bytes))
        if not self._is_short:
            say("memory is short: held samples are given back as the model needs it")
        self._is_short = True

    def end_epoch(self) -> None:
        if self.held is None:
            return
        self.held.widen()
        if self.held.is_useless:
            self.tell_useless(
                "what samples are made of is not seen as files that are opened, and they draw "
                "random numbers, or making them costs nothing"
            )
        elif size_bytes := self.held.too_large_bytes:
            room = bytes_text(self.held.arena.limit_bytes)
            self.tell_useless(f"one takes {bytes_text(size_bytes)}, and there is room for {room}")

    def tell_useless(self, why: str) -> None:
        """Once, to a user who has asked for a cache."""
        if self.asked_bytes and not self._has_told_useless:
            self._has_told_useless = True
            say(f"no samples are held: {why}")

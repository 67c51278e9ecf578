"""Sharing: devices that do not read offer their memory to the one that does.

Where each can be asked is written into the store over which devices have met; nobody waits for it.
Members of a new view have a new store, and tell it again.
"""

from __future__ import annotations

import json
import time
import weakref

from terrazzo.feed.arbiter import MEMORY_EVERY_S, Memory, room_bytes
from terrazzo.feed.guard import Guard
from terrazzo.feed.pantry import Address, Pantry
from terrazzo.feed.process import CAN_FORK
from terrazzo.runtime.net import Net
from terrazzo.runtime.sockets import own_address

KEY = "terrazzo/pantry"
PATIENCE_S = 5.0


def _key(net: Net, member: int) -> str:
    """Of one net: what was told about another, before or beside it, is not about this one."""
    return f"{KEY}/{net.number}/{member}"


def count_feed(net: Net) -> None:
    """One more way through data begins, on all devices."""
    net.__dict__["_feeds"] = net.__dict__.get("_feeds", 0) + 1


def _feeds(net: Net) -> int:
    found: int = net.__dict__.get("_feeds", 0)
    return found


class Offer:
    """What this device has for those that read: some memory, or none."""

    def __init__(self, net: Net) -> None:
        self.links, self._net = net.links, weakref.ref(net)
        self.pantry: Pantry | None = None
        self._guard = Guard()
        self.asked_bytes = 0
        self._checked = 0.0
        self._told: tuple[int, int, Address | None] | None = None
        self._reader: int | None = None
        """Whom it served last."""

    def ask(self, asked_bytes: int) -> None:
        """A feed of this net would have so much held; the first one that wants any decides."""
        if self.pantry is None and asked_bytes and CAN_FORK:
            room = room_bytes(Memory.here(), held_bytes=0, asked_bytes=asked_bytes)
            links = self.links
            me, address = links.members[links.device], own_address(links.sockets)
            self.asked_bytes = asked_bytes
            self.pantry = Pantry(room, device=me, address=address)
            self._guard.watch(self.pantry.arena)
            self._end = weakref.finalize(self, self.pantry.close)

    def tell(self) -> None:
        """Where this device can be asked; None: it holds nothing."""
        links, net = self.links, self._net()
        address = None if self.pantry is None else self.pantry.address
        if net is None or links.devices == 1:
            return
        told = (links.epoch, _feeds(net), address)
        if told != self._told:
            links.store.set(_key(net, links.members[links.device]), json.dumps(told[1:]))
            self._told = told

    def mind_memory(self) -> None:
        """Gives memory back before the next step needs it."""
        now = time.monotonic()
        if self.pantry is None or now - self._checked < MEMORY_EVERY_S:
            return
        self._checked = now
        self.tell()
        held = self.pantry.arena.used_bytes
        room = room_bytes(Memory.here(), held_bytes=held, asked_bytes=self.asked_bytes)
        if room < held:
            self.pantry.give_back(room)

    def serve(self, reader: int) -> None:
        """What one that is lost had put here has marks that nobody else can make."""
        if self.pantry is not None and self._reader not in (*self.links.members, None):
            self.pantry.empty()
        self._reader = reader
        self.tell()

    def close(self) -> None:
        """This device reads itself now."""
        if self.pantry is not None:
            self._end()
            self.pantry = None


class Offers:
    """What other devices hold for this one."""

    def __init__(self, net: Net) -> None:
        self.links, self._net = net.links, weakref.ref(net)
        self._found: dict[int, tuple[int, Address | None]] = {}
        """What each has told, and in which feed."""

    @property
    def device(self) -> int:
        return self.links.members[self.links.device]

    def __call__(self) -> list[Address]:
        """Those of devices that are still here."""
        links, net = self.links, self._net()
        if links.devices == 1 or net is None:
            return []
        for member in links.members:
            known, key = self._found.get(member), _key(net, member)
            if member == self.device or (known is not None and known[1] is not None):
                continue
            if links.store.check([key]):  # again where it had nothing: a later feed may want some
                number, told = json.loads(links.store.get(key))
                self._found[member] = number, None if told is None else Address(*told)
        found = [self._found[member][1] for member in links.members if member in self._found]
        return [address for address in found if address is not None]

    def wait(self) -> None:
        """Until all have told in this feed; they do before its first batch, made by this device."""
        end_s, net = time.monotonic() + PATIENCE_S, self._net()
        feeds = 0 if net is None else _feeds(net)
        others = [member for member in self.links.members if member != self.device]
        while time.monotonic() < end_s:
            self()
            told = [self._found.get(member, (-1, None)) for member in others]
            if all(number >= feeds or address is not None for number, address in told):
                return
            time.sleep(0.01)

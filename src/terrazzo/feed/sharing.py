"""Sharing: devices that do not read offer their memory to the one that does.

Where each can be asked is written into the store over which devices have met; nobody waits for it.
"""

from __future__ import annotations

import json
import time
import weakref

from terrazzo.feed.arbiter import Memory, room_bytes
from terrazzo.feed.pantry import Address, Pantry
from terrazzo.runtime.net import Net
from terrazzo.runtime.sockets import own_address

KEY = "terrazzo/pantry"
MEMORY_EVERY_S = 0.5
PATIENCE_S = 5.0


def tell(net: Net, address: Address | None) -> None:
    """Where this device can be asked; None: it holds nothing."""
    links = net.links
    links.store.set(_key(net, links.members[links.device]), json.dumps(address))


def _key(net: Net, member: int) -> str:
    """Of one net: what was told about another, before or beside it, is not about this one."""
    return f"{KEY}/{net.number}/{member}"


class Offer:
    """What this device holds for another."""

    def __init__(self, net: Net, asked_bytes: int) -> None:
        links = net.links
        self.asked_bytes, self._checked = asked_bytes, 0.0
        room = room_bytes(Memory.here(), held_bytes=0, asked_bytes=asked_bytes)
        me = links.members[links.device]
        self.pantry = Pantry(room, device=me, address=own_address(links.sockets))
        self._end = weakref.finalize(self, self.pantry.close)
        tell(net, self.pantry.address)

    def mind_memory(self) -> None:
        """Gives memory back before the next step needs it."""
        now = time.monotonic()
        if now - self._checked < MEMORY_EVERY_S:
            return
        self._checked = now
        held = self.pantry.arena.used_bytes
        room = room_bytes(Memory.here(), held_bytes=held, asked_bytes=self.asked_bytes)
        if room < held:
            self.pantry.give_back(room)

    def close(self) -> None:
        self._end()


class Offers:
    """What other devices hold for this one."""

    def __init__(self, net: Net) -> None:
        self.net, self.links = net, net.links
        self._found: dict[int, Address | None] = {}

    @property
    def device(self) -> int:
        return self.links.members[self.links.device]

    def __call__(self) -> list[Address]:
        """Those of devices that are still here."""
        links = self.links
        if links.devices == 1:
            return []
        for member in links.members:
            key = _key(self.net, member)
            if member not in self._found and member != self.device and links.store.check([key]):
                told = json.loads(links.store.get(key))
                self._found[member] = None if told is None else Address(*told)
        found = [self._found.get(member) for member in links.members]
        return [address for address in found if address is not None]

    def wait(self) -> None:
        """Until all have told; they do before their first batch, which this device makes."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            self()
            if len(self._found) >= self.links.devices - 1:
                return
            time.sleep(0.01)

"""Peers: the devices that hold samples for this one, found by arithmetic and trusted with nothing.

Who holds a sample follows from the seed, the number of the sample and the memory of each device:
every device draws a number for it, and the least one, counted in its memory, wins. When a device is
lost only its own samples get another place. What comes back carries a mark that only this reader
can have made of these bytes for this sample; whatever else comes back is not used, and neither is
who sent it. One that does not answer in time is left alone for a while, and storage is read; so it
is where a peer was slower than storage, which says nothing about what the peer has.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log

from terrazzo.feed.draws import SPAN, mix
from terrazzo.feed.pantry import (
    ASK,
    GET,
    GONE,
    HAVE,
    MARK_BYTES,
    MOST_BYTES,
    PUT,
    SIZE,
    YES,
    Address,
    read,
)
from terrazzo.members import hello
from terrazzo.members.line import exactly

CALL_S, ANSWER_S = 1.0, 2.0
LEAST_BYTES_PER_S = 2e6
"""Slower than this a peer counts as one that does not answer."""
ALONE_S, MOST_ALONE_S = 30.0, 3600.0
"""So long one that failed is left alone, and twice as long each time it fails again."""
SLOWER = 1.25
"""A peer that takes so many times as long as storage is not asked, but for a try now and then."""
TRY_SHARE = 0.01
"""Tries whether it has become faster take so much of the time, at most."""
ABSENT = b""
"""The answer of one that does not have a sample; no sample is empty."""


def owner_of(seed: int, index: int, rooms: Sequence[tuple[int, int]]) -> int | None:
    """Of devices and their memory, the one that holds this sample."""
    best, least = None, inf
    for device, room_bytes in rooms:
        if room_bytes <= 0:
            continue
        drawn = (mix(seed, device, index) + 1) / (SPAN + 1)
        if (score := -log(drawn) / room_bytes) < least:
            best, least = device, score
    return best


@dataclass
class _Peer:
    address: Address
    line: socket.socket | None = None
    until: float = 0.0
    """Left alone until then."""
    s_per_byte: float | None = None
    failed: int = 0
    """Times in a row."""
    again: float = 0.0
    """If it is slow, it is tried no sooner."""

    def took(self, seconds: float, size_bytes: int) -> None:
        self.s_per_byte = _mixed(self.s_per_byte, seconds / max(size_bytes, 1))
        self.failed, self.again = 0, time.monotonic() + seconds / TRY_SHARE


@dataclass
class Peers:
    """The connections of one process, and what it knows of them."""

    key: bytes = b""
    """Of the marks; nobody but this reader knows it. Another key is another shelf, too."""
    storage_s_per_byte: float | None = None
    liars: set[int] = field(default_factory=set)
    """Devices whose answers were not what had been put there."""
    _peers: dict[Address, _Peer] = field(default_factory=dict)

    def saw_storage(self, seconds: float, size_bytes: int) -> None:
        if size_bytes:
            self.storage_s_per_byte = _mixed(self.storage_s_per_byte, seconds / size_bytes)

    def get(self, address: Address, index: int) -> bytes | None:
        """ABSENT: it does not have it. None: it was not asked, or did not answer."""
        peer = self._peers.setdefault(address, _Peer(address))
        if not self._is_worth_it(peer):
            return None
        try:
            line, began = self._line(peer), time.perf_counter()
            line.settimeout(ANSWER_S)
            line.sendall(ASK.pack(GET, self._shelf, index))
            until = began + ANSWER_S
            if read(line, 1, until=until) != YES:
                return ABSENT
            size, mark = SIZE.unpack(read(line, SIZE.size, until=until))
            if size > MOST_BYTES:
                raise OSError(f"{size} bytes are no sample")
            data = bytes(read(line, size, until=until + size / LEAST_BYTES_PER_S))
            peer.took(time.perf_counter() - began, size)
        except OSError:
            self._fail(peer)
            return None
        if not hmac.compare_digest(mark, self._mark(index, data)):
            self.liars.add(address.device)
            self._leave(peer, inf)
            return None
        return data

    def put(self, address: Address, index: int, data: bytes) -> bool | None:
        """False: there is no room for it. None: it was not asked, or did not answer."""
        peer = self._peers.setdefault(address, _Peer(address))
        if len(data) > MOST_BYTES or not self._is_worth_it(peer):
            return None
        try:
            line, began = self._line(peer), time.perf_counter()
            line.settimeout(ANSWER_S)
            mark = self._mark(index, data)
            line.sendall(ASK.pack(PUT, self._shelf, index) + SIZE.pack(len(data), mark))
            if (answer := exactly(line, 1, or_say=GONE)) != YES:
                return answer == HAVE
            line.settimeout(ANSWER_S + len(data) / LEAST_BYTES_PER_S)
            line.sendall(data)
            done = exactly(line, 1, or_say=GONE) == YES
            peer.took(time.perf_counter() - began, len(data))
        except OSError:
            self._fail(peer)
            return None
        return done

    def _is_worth_it(self, peer: _Peer) -> bool:
        now = time.monotonic()
        if peer.until > now:
            return False
        if peer.s_per_byte is None or self.storage_s_per_byte is None or now >= peer.again:
            return True
        return peer.s_per_byte < SLOWER * self.storage_s_per_byte

    def _line(self, peer: _Peer) -> socket.socket:
        if peer.line is None:
            where = peer.address
            line = socket.create_connection((where.host, where.port), timeout=CALL_S)
            try:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello.call(line, secret=where.token.encode(), device=where.device)
            except OSError:
                line.close()
                raise
            peer.line = line
        return peer.line

    def _fail(self, peer: _Peer) -> None:
        self._leave(peer, min(ALONE_S * 2**peer.failed, MOST_ALONE_S))
        peer.failed += 1

    def _leave(self, peer: _Peer, seconds: float) -> None:
        peer.until = time.monotonic() + seconds
        if peer.line is not None:
            with contextlib.suppress(OSError):
                peer.line.close()
            peer.line = None

    def close(self) -> None:
        for peer in self._peers.values():
            self._leave(peer, 0.0)

    @property
    def _shelf(self) -> int:
        told = hashlib.blake2b(b"shelf", key=self.key, digest_size=8)
        return int.from_bytes(told.digest(), "little")

    def _mark(self, index: int, data: bytes) -> bytes:
        made = hashlib.blake2b(key=self.key, digest_size=MARK_BYTES)
        made.update(index.to_bytes(8, "little"))
        made.update(data)
        return made.digest()


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else 0.9 * before + 0.1 * now

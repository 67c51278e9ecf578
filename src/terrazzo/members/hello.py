"""Hello: two devices prove to each other that they know a secret, without ever sending it.

    listener ──▶ caller     a number drawn at random
    caller   ──▶ listener   one of its own, who it is, and a proof over both numbers
    listener ──▶ caller     its own proof over both

Callers are heard all at once. One who is silent, slow or wrong is hung up on, and meanwhile the
others get through. On lines of members the same is said in JSON (``Challenge``).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from terrazzo.members.line import exactly

NONCE_BYTES, PROOF_BYTES = 16, 32
CLAIM = struct.Struct(f"<{NONCE_BYTES}sI{PROOF_BYTES}s")
PATIENCE_S = 10.0
MOST_CALLERS = 64
HUNG_UP = "hung up before saying who it is"


def call(connection: socket.socket, *, secret: bytes, device: int) -> None:
    """Says who calls, and makes sure who answers; OSError where that is not who was meant."""
    theirs, own = exactly(connection, NONCE_BYTES, or_say=HUNG_UP), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(CLAIM.pack(own, device, _proof(secret, b"call", theirs, own, device)))
    seen = exactly(connection, PROOF_BYTES, or_say=HUNG_UP)
    if not hmac.compare_digest(seen, _proof(secret, b"answer", theirs, own, device)):
        raise OSError("who answered does not know this run's secret")


def answer(
    listener: socket.socket, *, secret: bytes, expected: Collection[int], timeout_s: float
) -> dict[int, socket.socket]:
    """The connections of all who are expected, each once; TimeoutError names who did not call."""
    found: dict[int, socket.socket] = {}
    callers: dict[socket.socket, _Caller] = {}
    listener.setblocking(False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            end_s = time.monotonic() + timeout_s
            while missing := sorted(set(expected) - set(found)):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"device {missing[0]} did not call within {timeout_s:g} s")
                for key, _ in selector.select(min(PATIENCE_S, left_s)):
                    if key.fileobj is listener:
                        _take(listener, selector, callers)
                    elif key.data in callers:  # not yet made to leave for somebody else
                        _hear(callers[key.data], secret, found=found, missing=missing)
                _send_away(selector, callers, found)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    finally:
        for connection in callers:
            connection.close()
    return found


def hear(connection: socket.socket, *, secret: bytes, timeout_s: float) -> int:
    """Who has called, once that is proved; OSError where it is not."""
    connection.settimeout(timeout_s)
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own)
    theirs, device, proof = CLAIM.unpack(exactly(connection, CLAIM.size, or_say=HUNG_UP))
    if not hmac.compare_digest(proof, _proof(secret, b"call", own, theirs, device)):
        raise OSError("who called does not know this run's secret")
    connection.sendall(_proof(secret, b"answer", own, theirs, device))
    return int(device)


@dataclass
class _Caller:
    """Somebody who has called and not yet proved anything."""

    connection: socket.socket
    nonce: bytes
    until_s: float
    told: bytes = b""
    is_wrong: bool = False

    def hear(self, secret: bytes, missing: Collection[int]) -> int | None:
        """Who it is, once that is proved."""
        try:
            part = self.connection.recv(CLAIM.size - len(self.told))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        self.told += part
        if part and len(self.told) < CLAIM.size:
            return None
        self.is_wrong = True
        if not part:
            return None
        theirs, device, proof = CLAIM.unpack(self.told)
        if device not in missing:
            return None
        wanted = _proof(secret, b"call", self.nonce, theirs, device)
        if not hmac.compare_digest(proof, wanted):
            return None
        with contextlib.suppress(OSError):
            self.connection.sendall(_proof(secret, b"answer", self.nonce, theirs, device))
            return int(device)
        return None


def _take(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    callers: dict[socket.socket, _Caller],
) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    if len(callers) >= MOST_CALLERS:  # the one who has kept us waiting longest makes room
        _drop(min(callers.values(), key=lambda one: one.until_s), selector, callers)
    connection.setblocking(False)
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        connection.sendall(nonce)
    except OSError:
        connection.close()
        return
    callers[connection] = _Caller(connection, nonce, time.monotonic() + PATIENCE_S)
    selector.register(connection, selectors.EVENT_READ, connection)


def _hear(
    caller: _Caller, secret: bytes, *, found: dict[int, socket.socket], missing: list[int]
) -> None:
    device = caller.hear(secret, missing)
    if device is not None:
        found[device] = caller.connection
        missing.remove(device)


def _send_away(
    selector: selectors.BaseSelector,
    callers: dict[socket.socket, _Caller],
    found: dict[int, socket.socket],
) -> None:
    """Those who got through, were wrong, or took too long."""
    now_s, known = time.monotonic(), set(found.values())
    for caller in list(callers.values()):
        if caller.connection in known:
            selector.unregister(caller.connection)
            del callers[caller.connection]
        elif caller.is_wrong or caller.until_s < now_s:
            _drop(caller, selector, callers)


def _drop(
    caller: _Caller, selector: selectors.BaseSelector, callers: dict[socket.socket, _Caller]
) -> None:
    selector.unregister(caller.connection)
    del callers[caller.connection]
    caller.connection.close()


def _proof(secret: bytes, who: bytes, listening: bytes, calling: bytes, device: int) -> bytes:
    text = b"terrazzo hello 1 " + who + listening + calling + struct.pack("<I", device)
    return hmac.new(secret, text, hashlib.sha256).digest()


class Challenge:
    """The same in messages of plain data, for those who may also tell where they are."""

    def __init__(self, nonce: str | None = None) -> None:
        self.nonce = nonce or secrets.token_hex(NONCE_BYTES)

    @property
    def asks(self) -> list[Any]:
        """What the listener says first."""
        return ["nonce", self.nonce]

    @classmethod
    def read(cls, message: Any) -> Challenge:
        """The caller's view of it."""
        kind, nonce = message
        if kind != "nonce" or not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
            raise ValueError("no hello")
        return cls(nonce)

    def claim(self, secret: str, device: int | None, address: str) -> list[Any]:
        """What the caller answers."""
        own = secrets.token_hex(NONCE_BYTES)
        return ["hello", own, device, address, self._sign(secret, "call", own, device, address)]

    def check(self, secret: str, message: Any) -> tuple[int | None, str, list[Any]]:
        """Who calls, from where, and what to answer; OSError, where it does not know the secret."""
        kind, own, device, address, seen = message
        texts = isinstance(own, str) and isinstance(address, str)
        if kind != "hello" or not texts or not isinstance(device, int | None):
            raise ValueError("no hello")
        if not hmac.compare_digest(str(seen), self._sign(secret, "call", own, device, address)):
            raise OSError("a stranger")
        return device, address, ["proof", self._sign(secret, "answer", own, device, address)]

    def confirm(self, secret: str, claim: list[Any], message: Any) -> None:
        """Makes sure that the listener knows the secret too."""
        kind, seen = message
        _, own, device, address, _ = claim
        wanted = self._sign(secret, "answer", own, device, address)
        if kind != "proof" or not hmac.compare_digest(str(seen), wanted):
            raise OSError("who answered does not know this run's secret")

    def _sign(self, secret: str, who: str, own: str, device: int | None, address: str) -> str:
        text = json.dumps(["terrazzo line 1", who, self.nonce, own, device, address])
        return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

"""A tunnel for connections that can't encrypt by themselves, such as those to torch's store.

    here                                                                there
    client ─▶ Door (loopback) ═══ TLS, both show the credentials ═══▶ Gate ─▶ server (loopback)

Strangers get no further than the handshake, which has its own thread and a time limit: one who is
slow, silent or sends garbage holds up nobody.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from terrazzo.runtime.credentials import Credentials

LOOPBACK = "127.0.0.1"
HANDSHAKE_S = 10.0
MOST_STRANGERS = 64
CHUNK_BYTES = 1 << 16
WELCOME = b"T"
Address = tuple[str, int]


class Gate:
    """Lets devices of this run through to a server on this machine's loopback."""

    def __init__(self, address: Address, server: Address, credentials: Credentials) -> None:
        context = credentials.serving()

        def let_in(caller: socket.socket) -> None:
            with (
                context.wrap_socket(caller, server_side=True) as known,
                socket.create_connection(server, timeout=HANDSHAKE_S) as inner,
            ):
                known.sendall(WELCOME)
                _pump(known, inner)

        self._porch = _Porch(listen(address), let_in)

    def close(self) -> None:
        self._porch.close()


class Door:
    """A port of this machine's loopback that leads to a gate elsewhere."""

    def __init__(self, gate: Address, credentials: Credentials) -> None:
        context = credentials.calling()

        def lead(caller: socket.socket) -> None:
            if not is_own(caller):
                return
            with _through(gate, context) as known:
                _pump(known, caller)

        _through(gate, context).close()  # better known now than by whoever knocks later
        listener = listen((LOOPBACK, 0))
        self.port = int(listener.getsockname()[1])
        self._porch = _Porch(listener, lead)

    def close(self) -> None:
        self._porch.close()


def _through(gate: Address, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection that the gate has let in; PermissionError where it does not know this run."""
    plain = socket.create_connection(gate, timeout=HANDSHAKE_S)
    try:
        known = context.wrap_socket(plain)
    except ssl.SSLError as error:
        plain.close()
        raise PermissionError(f"{gate[0]} does not show this run's credentials") from error
    except OSError:
        plain.close()
        raise
    try:
        if known.recv(len(WELCOME)) == WELCOME:  # with TLS 1.3 a refusal is only told here
            return known
    except ssl.SSLError:
        pass
    known.close()
    raise PermissionError(f"{gate[0]} does not accept this run's credentials")


class _Porch:
    """Takes callers, each in a thread of its own, and so many at once at most."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listener, self._serve = listener, serve
        self._room = threading.BoundedSemaphore(MOST_STRANGERS)
        threading.Thread(target=self._take, name="tunnel", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _take(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                caller.close()
                continue
            caller.settimeout(HANDSHAKE_S)
            threading.Thread(target=self._one, args=(caller,), name="tunnel", daemon=True).start()

    def _one(self, caller: socket.socket) -> None:
        try:
            with caller:
                self._serve(caller)
        except OSError:  # of which ssl's errors are some
            return
        finally:
            self._room.release()


def _pump(known: ssl.SSLSocket, plain: socket.socket) -> None:
    """Both ways until either end is gone; one thread, because TLS is no thing for two."""
    known.setblocking(False)
    plain.setblocking(False)
    waiting = {known: b"", plain: b""}  # what is still to be sent there
    other: dict[socket.socket, socket.socket] = {known: plain, plain: known}
    while True:
        readers = [one for one in (known, plain) if len(waiting[other[one]]) < CHUNK_BYTES]
        writers = [one for one, data in waiting.items() if data]
        pending = known in readers and known.pending() > 0
        readable, writable, _ = select.select(readers, writers, [], 0 if pending else None)
        for one in {*readable, *([known] if pending else [])}:
            data = _receive(one)
            if data == b"":
                return
            waiting[other[one]] += data or b""
        for one in {*writable, *(one for one, data in waiting.items() if data)}:
            waiting[one] = waiting[one][_send(one, waiting[one]) :]


def _receive(one: socket.socket) -> bytes | None:
    """None: nothing yet."""
    try:
        return one.recv(CHUNK_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None


def _send(one: socket.socket, data: bytes) -> int:
    try:
        return one.send(data)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return 0


def listen(address: Address) -> socket.socket:
    """A listener on that address alone."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def is_own(caller: socket.socket) -> bool:
    """Whether a caller on the loopback is a process of this user, as far as the kernel tells."""
    host, port = caller.getpeername()[:2]
    packed = "".join(f"{byte:02X}" for byte in reversed(socket.inet_aton(host)))
    try:
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return True
    owners = [int(line.split()[7]) for line in lines if line.split()[1] == f"{packed}:{port:04X}"]
    return not owners or os.geteuid() in owners

"""Meeting: devices that start together open lines to each other, all pairs."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.errors import LaunchError
from terrazzo.members.control import Control
from terrazzo.members.line import CLOSED, HEAD, LONGEST_BYTES, Line, exactly
from terrazzo.members.view import View

Family = socket.AddressFamily
Wrap = Callable[[socket.socket, bool], socket.socket]
"""Makes a connection an encrypted one; True: at the end that was called."""


def unwrapped(connection: socket.socket, called: bool) -> socket.socket:
    """A connection on one machine, or on a network that is trusted."""
    return connection


def listening(family: Family, host: str) -> socket.socket:
    """A socket that others can call, on the given interface only."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(64)
    return listener


def call(where: str, hello: list[Any], *, timeout_s: float, wrap: Wrap) -> socket.socket:
    """Connects to somebody who listens, and says who calls."""
    host, port = where.rsplit(" ", 1)
    connection = wrap(socket.create_connection((host, int(port)), timeout=timeout_s), False)
    data = json.dumps(hello).encode()
    connection.sendall(HEAD.pack(len(data)) + data)
    return connection


def heard(connection: socket.socket) -> Any:
    """The first message on a fresh connection; OSError or ValueError where it is none."""
    (length,) = HEAD.unpack(exactly(connection, HEAD.size, or_say=CLOSED))
    if length > LONGEST_BYTES:
        raise ValueError("too long")
    return json.loads(exactly(connection, length, or_say=CLOSED))


def meet(
    me: int,
    devices: int,
    *,
    at: tuple[Family, str],
    put: Callable[[str, str], None],
    get: Callable[[str], str],
    tie: int,
    limit_s: float,
    wrap: Wrap = unwrapped,
) -> Control:
    """All devices call this at one time; ``put`` and ``get`` are a place that all can read."""
    listener = listening(*at)
    if me == 0:
        put("token", secrets.token_hex(16))
    token = get("token")
    put(f"at {me}", f"{at[1]} {listener.getsockname()[1]}")
    addresses = {device: get(f"at {device}") for device in range(devices)}
    lines: dict[int, Line] = {}
    for other in range(me):
        hello = ["hello", token, me, addresses[me]]
        lines[other] = Line(call(addresses[other], hello, timeout_s=limit_s, wrap=wrap))
    deadline_s = time.monotonic() + limit_s
    while len(lines) < devices - 1:
        listener.settimeout(max(0.1, deadline_s - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(min(5.0, limit_s))
        with contextlib.suppress(OSError, ValueError, TypeError):
            connection = wrap(connection, True)
            kind, told, other, _ = heard(connection)
            if kind == "hello" and secrets.compare_digest(str(told), token):
                lines[int(other)] = Line(connection)
                continue
        connection.close()
    view = View(0, tuple(range(devices)), tie)
    return Control(
        me, view, lines=lines, listener=listener, token=token, addresses=addresses,
        limit_s=limit_s, wrap=wrap,
    )  # fmt: skip


def come_later(
    known: Sequence[str], *, token: str, limit_s: float, wrap: Wrap = unwrapped
) -> Control:
    """Asks those at some of these addresses to be let in; the first who answers tells who is here.

    The device is a guest until the members have made it one of them.
    """
    me, here, own = _introduced(known, token=token, limit_s=limit_s, wrap=wrap)
    listener = listening(*own)
    address = f"{own[1]} {listener.getsockname()[1]}"
    lines = {}
    for device, where in here.items():
        hello = ["hello", token, me, address]
        lines[device] = Line(call(where, hello, timeout_s=limit_s, wrap=wrap))
    control = Control(
        me, View(-1, (), 0), lines=lines, listener=listener, token=token,
        addresses={**here, me: address}, limit_s=limit_s, wrap=wrap,
    )  # fmt: skip
    control.ask_in()
    return control


def _introduced(
    known: Sequence[str], *, token: str, limit_s: float, wrap: Wrap
) -> tuple[int, dict[int, str], tuple[Family, str]]:
    """A number of one's own, who is here, and where one can be reached oneself."""
    trouble = "nobody was named"
    for where in known:
        try:
            with call(where, ["hello", token, None, ""], timeout_s=limit_s, wrap=wrap) as line:
                line.settimeout(limit_s)
                _, me, here = heard(line)
                own = (Family(line.family), line.getsockname()[0])
                return int(me), {int(d): str(at) for d, at in here.items()}, own
        except (OSError, ValueError) as error:
            trouble = f"{where}: {error}"
    raise LaunchError(
        f"no device of the run answers ({trouble}): does it still go on, and are these addresses "
        "those that its devices were given?"
    )

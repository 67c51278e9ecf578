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
from terrazzo.members.hello import Challenge
from terrazzo.members.line import CLOSED, HEAD, LONGEST_BYTES, Line, exactly, read
from terrazzo.members.strangers import Wrap
from terrazzo.members.view import View

Family = socket.AddressFamily
CALL_S = 10.0
"""How long one who comes later waits for a member to answer."""


def unwrapped(connection: socket.socket, called: bool) -> socket.socket:
    """A connection on one machine, or on a network that is trusted."""
    return connection


def listening(family: Family, host: str) -> socket.socket:
    """A socket that others can call, on the given interface only."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(64)
    return listener


def call(
    where: str, who: tuple[int | None, str], *, token: str, timeout_s: float, wrap: Wrap
) -> socket.socket:
    """Connects to somebody who listens, and says who calls and from where.

    Both prove that they know the token, and neither sends it.
    """
    host, port, *_ = where.split(" ")
    plain = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        connection = wrap(plain, False)
        challenge = Challenge.read(heard(connection))
        claim = challenge.claim(token, *who)
        tell(connection, claim)
        challenge.confirm(token, claim, heard(connection))
    except BaseException:
        plain.close()
        raise
    return connection


def answered(connection: socket.socket, token: str) -> int:
    """Who has called; OSError, ValueError or TypeError where it is none of the run."""
    challenge = Challenge()
    tell(connection, challenge.asks)
    device, _, proof = challenge.check(token, heard(connection))
    if device is None:
        raise ValueError("it comes later, when all are here")
    tell(connection, proof)
    return device


def tell(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(HEAD.pack(len(data)) + data)


def heard(connection: socket.socket) -> Any:
    """The next message of one who is waited for; OSError or ValueError where it is none."""
    (length,) = HEAD.unpack(exactly(connection, HEAD.size, or_say=CLOSED))
    if length > LONGEST_BYTES:
        raise ValueError("too long")
    return read(exactly(connection, length, or_say=CLOSED))


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
    name: str = "",
) -> Control:
    """All devices call this at one time; ``put`` and ``get`` are a place that all can read.

    ``name`` is what people call this device.
    """
    listener = listening(*at)
    if me == 0:
        put("token", secrets.token_hex(16))
    token = get("token")
    put(f"at {me}", _address(at[1], listener, name))
    addresses = {device: get(f"at {device}") for device in range(devices)}
    lines: dict[int, Line] = {}
    for other in range(me):
        who = (me, addresses[me])
        line = call(addresses[other], who, token=token, timeout_s=limit_s, wrap=wrap)
        lines[other] = Line(line)
    deadline_s = time.monotonic() + limit_s
    while len(lines) < devices - 1:
        listener.settimeout(max(0.1, deadline_s - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(min(5.0, limit_s))
        with contextlib.suppress(OSError, ValueError, TypeError):
            connection = wrap(connection, True)
            other = answered(connection, token)
            if other in range(me + 1, devices) and other not in lines:
                lines[other] = Line(connection)
                continue
        connection.close()
    view = View(0, tuple(range(devices)), tie)
    return Control(
        me, view, lines=lines, listener=listener, token=token, addresses=addresses,
        limit_s=limit_s, wrap=wrap,
    )  # fmt: skip


def come_later(
    known: Sequence[str], *, token: str, limit_s: float, wrap: Wrap = unwrapped, name: str = ""
) -> Control:
    """Asks those at some of these addresses to be let in; the first who answers tells who is here.

    The device is a guest until the members have made it one of them.
    """
    me, here, own = _introduced(known, token=token, limit_s=limit_s, wrap=wrap)
    listener = listening(*own)
    address = _address(own[1], listener, name)

    def reach(where: str) -> Line:
        each_s = min(limit_s, CALL_S)
        return Line(call(where, (me, address), token=token, timeout_s=each_s, wrap=wrap))

    lines: dict[int, Line] = {}
    for device, where in here.items():
        # One that is lost meanwhile is no member for long; one that is there is told of again.
        with contextlib.suppress(OSError, ValueError, TypeError):
            lines[device] = reach(where)
    control = Control(
        me, View(-1, (), 0), lines=lines, listener=listener, token=token,
        addresses={**here, me: address}, limit_s=limit_s, wrap=wrap,
    )  # fmt: skip
    control.reach = reach
    control.ask_in()
    return control


def _address(host: str, listener: socket.socket, name: str) -> str:
    """Where a device is called, and what people call it."""
    where = f"{host} {listener.getsockname()[1]}"
    return f"{where} {name.replace(' ', '-')}" if name else where


def _introduced(
    known: Sequence[str], *, token: str, limit_s: float, wrap: Wrap
) -> tuple[int, dict[int, str], tuple[Family, str]]:
    """A number of one's own, who is here, and where one can be reached oneself."""
    trouble = "nobody was named"
    for where in known:
        try:
            with call(where, (None, ""), token=token, timeout_s=limit_s, wrap=wrap) as line:
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

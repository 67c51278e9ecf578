"""The door: strangers who call a device of the run, and what they must say to be let in."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from terrazzo.members.hello import Challenge
from terrazzo.members.line import Line, LineError

HELLO_S = 5.0
"""How long one may take to say who it is."""


class Door:
    """A listener, and those who have called and not yet proved anything."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        wrap: Callable[[socket.socket, bool], socket.socket],
    ) -> None:
        listener.setblocking(False)
        self.listener, self._token, self._wrap = listener, token, wrap
        self._strangers: dict[Line, tuple[float, Challenge]] = {}

    def answer(self) -> Line | None:
        """Takes a call; None where it has ended already."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)  # a handshake goes on as messages come
            line = Line(self._wrap(connection, True))
            self._strangers[line] = (time.monotonic(), Challenge())
            line.say(self._strangers[line][1].asks)
            return line
        return None

    def greet(self, line: Line, message: Any) -> tuple[int | None, str]:
        """Who it is and where it can be reached; OSError, where it does not know the token."""
        if line not in self._strangers:
            raise LineError("it has said hello before")
        device, address, proof = self._strangers[line][1].check(self._token, message)
        line.say(proof)
        return device, address

    def forget(self, line: Line) -> None:
        """It is no stranger any more, or gone."""
        self._strangers.pop(line, None)

    def overdue(self, now_s: float) -> list[Line]:
        """Those who have had time enough."""
        found = [
            line for line, (since_s, _) in self._strangers.items() if now_s - since_s > HELLO_S
        ]
        for line in found:
            del self._strangers[line]
        return found

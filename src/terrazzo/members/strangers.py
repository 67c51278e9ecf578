"""Strangers: those who call a member of a run and have not yet proved that they belong to it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from terrazzo.members.hello import Challenge
from terrazzo.members.line import Line, LineError

HELLO_S = 5.0
MOST_STRANGERS = 16
"""Each may have 2 MiB waiting; the one who has kept us waiting longest makes room."""

Wrap = Callable[[socket.socket, bool], socket.socket]
"""Makes a connection an encrypted one; True: at the end that was called."""


class Strangers:
    """The listener of a member, and who has called there."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, wrap: Wrap
    ) -> None:
        self.listener, self._selector, self._wrap = listener, selector, wrap
        self._callers: dict[Line, tuple[float, Challenge]] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, None)

    @property
    def lines(self) -> list[Line]:
        return list(self._callers)

    def answer(self) -> None:
        """Somebody calls: it is asked to prove that it knows the token."""
        try:
            connection, _ = self.listener.accept()
        except OSError:  # too many open files, say: it would be asked again at once, for ever
            self._pause()
            return
        if len(self._callers) >= MOST_STRANGERS:
            self.drop(min(self._callers, key=lambda line: self._callers[line][0]))
        with contextlib.suppress(OSError):
            connection.setblocking(False)  # a handshake goes on as messages come
            line = Line(self._wrap(connection, True))
            self._callers[line] = (time.monotonic(), Challenge())
            self._selector.register(line, selectors.EVENT_READ, line)
            line.say(self._callers[line][1].asks)

    def greeted(self, line: Line, token: str, message: Any) -> tuple[int | None, str]:
        """Who it says it is, and where; it is told that this device knows the token too."""
        if line not in self._callers:
            raise LineError("it has said hello before")
        device, address, proof = self._callers[line][1].check(token, message)
        line.say(proof)
        return device, address

    def forget(self, line: Line) -> None:
        """It is a stranger no more."""
        self._callers.pop(line, None)

    def drop(self, line: Line) -> None:
        self.forget(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        line.close()

    def watch(self, now_s: float) -> None:
        """Sends away who takes too long; listens again where that was not possible."""
        for line, (since_s, _) in list(self._callers.items()):
            if now_s - since_s > HELLO_S:
                self.drop(line)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.register(self.listener, selectors.EVENT_READ, None)

    def _pause(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.listener)

    def close(self) -> None:
        for line in list(self._callers):
            self.drop(line)
        self._pause()
        self.listener.close()

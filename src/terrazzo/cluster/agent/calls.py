"""Trying connections between devices: one holds a port open, others see whether they get there."""

from __future__ import annotations

import socket
import time
from typing import Any

from terrazzo.cluster.agent.frames import Frames

CALL_S = 3.0


def hold(request: dict[str, Any], frames: Frames) -> None:
    """Listens on an address until the other end hangs up; callers get nothing to hear."""
    with socket.create_server((request["address"], 0)) as listener:
        frames.tell(listener.getsockname()[1])
        try:
            frames.receive()
        except EOFError:
            return


def call(request: dict[str, Any]) -> list[dict[str, Any]]:
    """How long it took to connect to each, or why that was impossible."""
    found: list[dict[str, Any]] = []
    for address, port in request["targets"]:
        began_s = time.monotonic()
        try:
            source = (request["address"], 0)
            socket.create_connection((address, port), CALL_S, source_address=source).close()
        except OSError as error:
            found.append({"error": error.strerror or str(error)})
        else:
            found.append({"took_s": time.monotonic() - began_s})
    return found

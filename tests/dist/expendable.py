"""Expendable devices: fresh processes for tests that kill, stop or lose them.

They are forked from a server that has loaded torch already, so each costs little. ``fate`` tells
how each ended: what its function returned, what it raised, or that it is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from devices import exports_folder, forking

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from strike import strike

__all__ = ["Fate", "die", "fates", "strike"]

LAST_S = 200.0
"""When all must have ended: only what hangs takes so long, however busy the machine is."""
PATIENT_S = 20.0
"""How long a device may be silent where a test says nothing else: many share a few cores here, and
one that only gets none for a while must not be taken for lost."""


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


@dataclass(frozen=True)
class Fate:
    """``kind`` is done, raised, gone or silent; ``what`` the value or the name of the error."""

    kind: str
    what: Any = None
    message: str = ""


def _live(
    pipe: Connection, environment: dict[str, str], timeout_s: float, call: Any, exports: Path
) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from devices import _load
    from exports import keep_exports

    import terrazzo as tz
    from terrazzo.members import health

    health.LEAST_SILENT_S = PATIENT_S
    torch.set_num_threads(1)
    keep_exports(exports)
    path, name, args = call
    try:
        tz.init(timeout_s=timeout_s)
        pipe.send(Fate("done", getattr(_load(path), name)(*args)))
    except Exception as error:
        pipe.send(Fate("raised", type(error).__name__, str(error)))
        raise SystemExit(1) from None


def fates(
    devices: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 30,
    without: Sequence[int] = (),
    ignoring: Sequence[int] = (),
    joining: Path | None = None,
) -> list[Fate]:
    """Runs ``function`` on fresh devices and tells how each ended.

    ``timeout_s`` is the devices' own; ``without`` are never started, ``ignoring`` not waited for.
    With ``joining``, a file, one more device comes when the others are there, and is told last.
    """
    context = forking()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = (function.__code__.co_filename, function.__qualname__, args)
    pipes, processes = {}, []

    def start(device: int, environment: dict[str, str]) -> None:
        ours, theirs = context.Pipe()
        given = (theirs, environment, timeout_s, call, exports_folder())
        process = context.Process(target=_live, args=given, daemon=True)
        process.start()
        theirs.close()
        pipes[device] = ours
        processes.append(process)

    later = {} if joining is None else {"TERRAZZO_MEMBERS": str(joining), "TERRAZZO_RECOVER": "1"}
    for device in range(devices):
        if device not in without:
            environment = {
                "RANK": str(device), "WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **later,
            }  # fmt: skip
            start(device, environment)
    if joining is not None:
        _wait_for(joining)
        start(devices, {**later, "TERRAZZO_JOIN": "1", "GLOO_SOCKET_IFNAME": "lo"})
        devices += 1
    try:
        deadline = time.monotonic() + LAST_S
        waited = [device for device in range(devices) if device in pipes]
        return [
            Fate("silent") if device in ignoring else _fate(pipes[device], deadline)
            for device in waited
        ]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 40
    while not (path.exists() and path.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)


def _fate(pipe: Connection, deadline: float) -> Fate:
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        return Fate("silent")
    try:
        fate: Fate = pipe.recv()
    except EOFError:
        return Fate("gone")
    return fate

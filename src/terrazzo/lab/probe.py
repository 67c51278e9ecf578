"""Measuring from inside devices: one process that imports torch once and forks into each of them.

Run as ``python -m terrazzo.lab.probe`` with a list of places as JSON on its command line: each is
the number of a socket, and what ``enter`` needs to move there. A child answers one line of JSON to
each line of JSON it is asked, until its socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import signal
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from terrazzo.cluster.leash import PR_SET_PDEATHSIG
from terrazzo.lab.enter import enter

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = ((32, 104), (64, 52), (128, 26), (256, 13))
"""Channels and side of the 3x3 convolutions that stand for training: those of a detector, from
its large maps to its many channels."""
FLOPS = sum(2 * 9 * channels**2 * side**2 for channels, side in LAYERS)
CHUNK = 1 << 18
PING_BYTES, PINGS = 64, 21
PATIENCE_S = 20.0
SO_MAX_PACING_RATE = 47
"""Bytes a second; the kernel bundles a millisecond's worth."""
PACE_OVER = 1.1


class Compute:
    """Convolutions, counted over wall time and over processor time."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *, seconds: float, threads: int) -> dict[str, float]:
        import torch

        torch.set_num_threads(threads)
        if not self._layers:
            self._layers = [
                (torch.randn(1, c, side, side), torch.randn(c, c, 3, 3)) for c, side in LAYERS
            ]
        rounds = 0
        with torch.no_grad():
            self._once(torch)  # the first round pays for setting up
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - begin_s < seconds:
                self._once(torch)
                rounds += 1
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        return {"flops": float(FLOPS * rounds), "wall_s": wall_s, "cpu_s": cpu_s}

    def _once(self, torch: Any) -> None:
        for x, weight in self._layers:
            torch.conv2d(x, weight, padding=1)


class Wire:
    """One TCP connection: what is sent into it, and what comes out of it."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None

    def listen(self) -> dict[str, int]:
        self.close()
        self._server = socket.create_server(("0.0.0.0", 0))
        self._server.settimeout(PATIENCE_S)
        return {"port": self._server.getsockname()[1]}

    def send(
        self, *, address: str, port: int, seconds: float, bits_per_s: float = 0.0
    ) -> dict[str, int]:
        """As fast as it goes; told a link's rate, in bundles that are right for it."""
        sent, data = 0, bytes(CHUNK)
        with socket.create_connection((address, port), timeout=PATIENCE_S) as link:
            if bits_per_s:
                pace = round(PACE_OVER * bits_per_s / 8)
                link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                sent += link.send(data)
        return {"bytes": sent}

    def receive(self, *, skip_s: float, seconds: float) -> dict[str, float]:
        """Bytes in all, and the rate within a window after the flow has come up to speed."""
        assert self._server is not None
        link, _ = self._server.accept()
        buffer = bytearray(CHUNK)
        total, marks = 0, []
        with link:
            link.settimeout(PATIENCE_S)
            begin_s = time.perf_counter()
            while count := link.recv_into(buffer):
                total += count
                marks.append((time.perf_counter() - begin_s, total))
        inside = [mark for mark in marks if skip_s <= mark[0] <= skip_s + seconds]
        if len(inside) < 2:
            return {"bytes": total, "bits_per_s": 0.0}
        (begin_s, before), (end_s, after) = inside[0], inside[-1]
        return {"bytes": total, "bits_per_s": 8 * (after - before) / max(end_s - begin_s, 1e-9)}

    def echo(self) -> dict[str, int]:
        assert self._server is not None
        link, _ = self._server.accept()
        count = 0
        with link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := link.recv(PING_BYTES):
                link.sendall(data)
                count += 1
        return {"echoes": count}

    def ping(self, *, address: str, port: int) -> dict[str, float]:
        """The median time of a small message there and back."""
        times = []
        with socket.create_connection((address, port), timeout=PATIENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                begin_s = time.perf_counter()
                link.sendall(bytes(PING_BYTES))
                link.recv(PING_BYTES, socket.MSG_WAITALL)
                times.append(time.perf_counter() - begin_s)
        return {"round_trip_s": statistics.median(times)}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def fill(*, limit_bytes: int) -> dict[str, int]:
    """How much memory a process gets before the kernel ends it, and which signal ended it."""
    tell, told = os.pipe()
    child = os.fork()
    if child == 0:
        _touch(told, limit_bytes)
    os.close(told)
    with os.fdopen(tell, "rb") as lines:
        reached = [int(line) for line in lines.read().split()]
    _, status = os.waitpid(child, 0)
    return {"bytes": reached[-1] if reached else 0, "signal": os.WTERMSIG(status)}


def _touch(told: int, limit_bytes: int) -> None:
    step = 4 << 20
    space = mmap.mmap(-1, limit_bytes + step)
    with contextlib.suppress(OSError):  # large pages take less of the kernel's time
        space.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(space))
    for begin in range(0, limit_bytes, step):
        ctypes.memset(address + begin, 1, step)
        os.write(told, b"%d\n" % (begin + step))
    os._exit(0)


def answer(link: socket.socket) -> None:
    """Does what it is asked, until nobody asks any more."""
    wire = Wire()
    tasks = {
        "compute": Compute(), "listen": wire.listen, "send": wire.send, "receive": wire.receive,
        "echo": wire.echo, "ping": wire.ping, "fill": fill,
    }  # fmt: skip
    with link, link.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            asked: dict[str, Any] = json.loads(line)
            try:
                reply: dict[str, Any] = tasks[asked.pop("do")](**asked)  # type: ignore[operator]
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(reply) + "\n")
            lines.flush()


def main() -> None:
    places: list[dict[str, Any]] = json.loads(sys.argv[1])
    if sys.argv[2] == "compute":
        import torch

        torch.set_num_threads(1)
    gc.freeze()  # looked through by a child, torch's objects would be copied: a tenth of a second
    children = []
    for place in places:
        child = os.fork()
        if child == 0:
            _become(place, places)
        children.append(child)
    for place in places:
        os.close(place["socket"])
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)  # torch takes its time to say goodbye


def _become(place: dict[str, Any], places: list[dict[str, Any]]) -> None:
    """The child's whole life; it must not return into the parent's."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError, ConnectionError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for other in places:
            if other is not place:
                os.close(other["socket"])
        with socket.socket(fileno=place["socket"]) as link:
            try:
                enter(*place["enter"])
            except OSError as error:
                link.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
                os._exit(1)
            os.environ.update(place["environment"])  # nothing was computed yet
            link.sendall(b'{"ready": 1}\n')
            answer(link)
    os._exit(0)


if __name__ == "__main__":
    main()

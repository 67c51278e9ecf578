"""Probes: processes in all devices, and at the switch, that measure when they are asked to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from terrazzo.cluster.process import LEASH
from terrazzo.errors import LabError
from terrazzo.lab import vectors
from terrazzo.lab.hosts import LabHosts

READY_S = 120.0
ANSWER_S = 60.0


class Probe:
    """One measuring process, somewhere in the lab."""

    def __init__(self, name: str, link: socket.socket) -> None:
        self.name = name
        self._link = link
        self._lines = link.makefile("rw", encoding="utf-8")

    def ask(self, do: str, **values: Any) -> None:
        try:
            self._lines.write(json.dumps({"do": do, **values}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise LabError(f"the probe on {self.name} has gone: {error}") from error

    def answer(self, *, limit_s: float = ANSWER_S) -> dict[str, Any]:
        self._link.settimeout(limit_s)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise LabError(f"the probe on {self.name} gave no answer: {error}") from error
        if not line:
            raise LabError(f"the probe on {self.name} ended before it answered")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise LabError(f"the probe on {self.name} failed: {reply['error']}")
        return reply

    def close(self) -> None:
        self._lines.close()
        self._link.close()


class Probes:
    """In each device two, so that it can send and receive at once; at the switch one for each."""

    def __init__(self, found: Sequence[Probe], devices: int) -> None:
        self.inside = found[:devices]
        self.beside = found[devices : 2 * devices]
        self.switch = found[2 * devices :]

    @classmethod
    @contextmanager
    def start(cls, hosts: LabHosts, *, compute: bool = True) -> Iterator[Probes]:
        """Starts at full speed: importing torch on a slow device would take its time."""
        places = [hosts.place(device) for device in range(len(hosts.names))]
        widths = [vectors.environment(one.vector_bits) for one in hosts.topology.devices]
        switch = [f"/proc/{os.getpid()}/fd/{hosts.network.switch}", "", ""]
        ends = [*places, *places, *[switch] * len(places)]
        names = [*hosts.names, *hosts.names, *["the switch"] * len(places)]
        pairs = [socket.socketpair() for _ in ends]
        numbers = [theirs.fileno() for _, theirs in pairs]
        told = [
            {"socket": number, "enter": [*end[:3], end[3:]], "environment": width}
            for number, end, width in zip(
                numbers, ends, [*widths, *widths, *[{}] * len(places)], strict=True
            )
        ]
        probes = [Probe(name, ours) for name, (ours, _) in zip(names, pairs, strict=True)]
        with hosts.full_speed():
            process = _start(told, numbers, compute)
            try:
                for _, theirs in pairs:
                    theirs.close()
                for probe in probes:
                    probe.answer(limit_s=READY_S)
            except BaseException:
                process.kill()
                process.wait()
                raise
        try:
            yield cls(probes, len(places))
        finally:
            for probe in probes:
                probe.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(
    told: list[dict[str, Any]], numbers: list[int], compute: bool
) -> subprocess.Popen[bytes]:
    worker = [
        sys.executable,
        "-m",
        "terrazzo.lab.probe",
        json.dumps(told),
        "compute" if compute else "",
    ]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *worker],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # waiting threads would use the quota
        pass_fds=numbers,
        start_new_session=True,
    )

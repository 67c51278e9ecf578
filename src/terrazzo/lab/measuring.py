"""Measuring: devices, real or emulated, time operators and links at once, and one tells of all."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.cluster import Hosts, launch
from terrazzo.cluster.printer import Printer
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import LaunchError, RunError
from terrazzo.lab.hosts import LabHosts
from terrazzo.measure.job import CPU, MARK, READY, MeasureJob, answer_path, error_path, go_path
from terrazzo.records import Graph, document
from terrazzo.records.profile import Profile, device_from, network_from


def measure(
    hosts: Hosts,
    graph: Graph,
    *,
    key: Mapping[str, str],
    budget_s: float,
    tell: Callable[[str], None],
    lie_on: Sequence[str] = (),
) -> Profile:
    """Starts a process on each device, lets all measure at once, and reads what they found.

    ``lie_on``: what the net of each device lies on, by torch's names; else their CPUs.
    """
    lie_on = tuple(lie_on) or (CPU,) * len(hosts.names)
    with tempfile.TemporaryDirectory(prefix="terrazzo-measure-") as folder:
        desk = Path(folder)
        MeasureJob(hosts.names, memory_bytes(hosts), budget_s, lie_on).write(desk, graph)
        everywhere(hosts, desk)
        run_job(desk, hosts, tell)
        hosts.fetch(answer_path(desk), device=0, destination=answer_path(desk))
        body = json.loads(answer_path(desk).read_text(encoding="utf-8"))
    with document.reading("answer of devices"):
        network = body["network"]
        return Profile(
            key=key,
            devices=tuple(device_from(table) for table in body["devices"]),
            network=None if network is None else network_from(network),
            measured_s=time.time(),
        )


def memory_bytes(hosts: Hosts) -> tuple[int, ...]:
    """What each device has; 0 where that is not known."""
    if isinstance(hosts, SshHosts):
        return tuple(
            device.memory_bytes or fact.memory_bytes
            for device, fact in zip(hosts.cluster.devices, hosts.facts, strict=True)
        )
    if not isinstance(hosts, LabHosts):
        return (0,) * len(hosts.names)
    return tuple(device.memory_bytes for device in hosts.topology.devices)


def everywhere(hosts: Hosts, path: Path) -> None:
    """A file or folder to the same place on all devices that do not share this machine's files."""
    for device in range(len(hosts.names)):
        hosts.copy(path, device=device, destination=path)


def run_job(desk: Path, hosts: Hosts, tell: Callable[[str], None]) -> None:
    """A job that was written, on all devices, until they have answered."""
    command = [sys.executable, "-m", "terrazzo.measure.worker", str(desk)]
    start = _Start(desk, hosts, tell)
    try:
        result = launch(command, hosts, output=start.line)
    finally:
        start.full_speed.close()
    if result.failure is None:
        return
    message = error_path(desk, result.failure.device)
    with suppress(LaunchError):  # it may have ended without a word
        hosts.fetch(message, device=result.failure.device, destination=message)
    if message.exists():
        raise RunError(message.read_text(encoding="utf-8"))
    raise RunError(f"measuring did not finish: {result.failure}")


@dataclass
class _Start:
    """Devices start up at full speed and begin to measure together, at their own."""

    desk: Path
    hosts: Hosts
    tell: Callable[[str], None]
    ready: set[int] = field(default_factory=set)
    full_speed: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.printer = Printer(self.hosts.names, out=sys.stderr)
        if isinstance(self.hosts, LabHosts):
            self.full_speed.enter_context(self.hosts.full_speed())

    def line(self, device: int, text: str) -> None:
        if not text.startswith(MARK):
            self.printer.line(device, text)
            return
        word = text.removeprefix(MARK)
        if word != READY:
            self.tell(f"{self.hosts.names[device]}: {word}")
            return
        self.ready.add(device)
        if len(self.ready) == len(self.hosts.names):
            self.full_speed.close()
            go_path(self.desk).touch()
            everywhere(self.hosts, go_path(self.desk))

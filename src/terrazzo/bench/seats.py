"""Seats: where a peer's processes are, on all devices or on one, one in each or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from terrazzo.cluster import Hosts
from terrazzo.cluster.process import Process


class Seats:
    """Processes as hosts that ``launch`` starts one command on each of."""

    def __init__(self, hosts: Hosts, devices: Sequence[int], *, processes: int = 1) -> None:
        self.hosts = hosts
        self.devices = tuple(devices)
        self.processes = processes
        """In each device."""

    @property
    def places(self) -> tuple[int, ...]:
        """The device of each process."""
        return tuple(device for device in self.devices for _ in range(self.processes))

    @property
    def names(self) -> tuple[str, ...]:
        if self.processes == 1:
            return tuple(self.hosts.names[device] for device in self.devices)
        return tuple(
            f"{self.hosts.names[device]}.{index % self.processes}"
            for index, device in enumerate(self.places)
        )

    def address(self, device: int) -> str:
        return self.hosts.address(self.places[device])

    def port(self) -> AbstractContextManager[int]:
        return self.hosts.port()

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        own = self.hosts.environment(self.places[device], port=port, base=base)
        return own | {
            "RANK": str(device),
            "WORLD_SIZE": str(len(self.places)),
            "MASTER_ADDR": self.address(0),
        }

    def run(
        self, command: Sequence[str], *, device: int, environment: Mapping[str, str]
    ) -> Process:
        process = self.hosts.run(command, device=self.places[device], environment=environment)
        process.device, process.name = device, self.names[device]
        return process

    def copy(self, source: Path, *, device: int, destination: Path) -> None:
        self.hosts.copy(source, device=self.places[device], destination=destination)

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        self.hosts.fetch(source, device=self.places[device], destination=destination)

    def kill(self, device: int) -> None:
        self.hosts.kill(self.places[device])

    def can_return(self, device: int, members: Path) -> bool:
        return self.hosts.can_return(self.places[device], members)

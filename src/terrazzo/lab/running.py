"""A lab that runs: its network and its groups, in this process or seen from another."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from terrazzo.errors import UsageError
from terrazzo.lab.groups import Group, Groups, Usage, find_groups
from terrazzo.lab.network import Network, Traffic
from terrazzo.lab.state import LabState
from terrazzo.lab.topology import Topology


class RunningLab:
    """What can be asked of devices, and done to them, while they run."""

    def __init__(self, name: str, *, topology: Topology, network: Network, groups: Groups) -> None:
        self.name = name
        self.topology = topology
        self.network = network
        self.groups = groups

    @classmethod
    def attach(cls, state: LabState) -> RunningLab:
        """The lab of another process; the caller closes its network."""
        topology = state.devices
        network = Network.attach(topology, state.process, state.namespaces)
        return RunningLab(state.lab, topology=topology, network=network, groups=find_groups())

    def group(self, device: int) -> Group:
        return self.groups.device(self.name, self.topology.names[device])

    def usage(self, device: int) -> Usage:
        """Memory now and at its peak, processor time, kills: of all processes in the device."""
        return self.group(device).usage()

    def traffic(self, device: int) -> Traffic:
        """Bytes through the device's interface since the lab was made."""
        return self.network.traffic(device)

    def reset_peak(self, device: int) -> bool:
        """Starts the device's memory peak anew; False where this kernel can't forget one."""
        return self.group(device).reset_peak()

    def kill(self, device: int) -> None:
        """Ends every process in the device."""
        group = self.group(device)
        for process in group.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.groups.can_freeze:
            group.freeze(False)  # a frozen process can't die

    def number_of(self, text: str) -> int:
        """A device by its name or its number."""
        names = self.topology.names
        if text in names:
            return names.index(text)
        if text.isascii() and text.isdigit() and int(text) < len(names):
            return int(text)
        raise UsageError(f"no device {text}; there are {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"

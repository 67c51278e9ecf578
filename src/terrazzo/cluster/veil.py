"""The veil over a cluster: WireGuard between its devices, set up before a run and gone after it.

Everything that devices say to each other then travels inside: gloo's connections, our own, and the
store. Their services listen on addresses that exist only there. A device that has booted gets its
address again, with a new key, which the others are told.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from terrazzo.cluster.agent.frames import BEAT
from terrazzo.cluster.inspection import Facts
from terrazzo.cluster.session import session
from terrazzo.cluster.ssh import Ssh
from terrazzo.errors import HostError

NETWORKS = [ipaddress.ip_network(f"10.{second}.77.0/24") for second in range(213, 255)]


class End:
    """One device's end: its address inside, for as long as an agent there holds the interface."""

    def __init__(self, ssh: Ssh, host: str, address: str, request: dict[str, Any]) -> None:
        """``host`` is where the others find it outside."""
        self.ssh, self.host, self.address = ssh, host, address
        self._held = ExitStack()
        self.session = self._held.enter_context(session(ssh, "veil", address=address, **request))

    def hear_name(self) -> None:
        """The interface there, and how others reach it."""
        told = self.session.hear()
        self.interface, self._way = str(told["name"]), {"key": told["key"], "port": told["port"]}

    @property
    def row(self) -> dict[str, Any]:
        """What the others must know."""
        return {**self._way, "host": self.host, "address": self.address}

    @property
    def is_held(self) -> bool:
        return self.session.process.poll() is None

    def close(self) -> None:
        self._held.close()


class Veil:
    """The ends of all devices."""

    def __init__(self, network: ipaddress.IPv4Network, lost_after_s: float) -> None:
        self._network, self._lost_after_s = network, lost_after_s
        self._ends: list[End] = []
        self._mending = threading.Lock()

    def address(self, device: int) -> str:
        return str(self._network[device + 1])

    def interface(self, device: int) -> str:
        return self._ends[device].interface

    def begin(self, devices: Sequence[tuple[Ssh, str]]) -> None:
        """All devices at once, each with where it is found outside."""
        for number, (ssh, host) in enumerate(devices):
            self._ends.append(self._end(number, ssh, host))
        for end in self._ends:
            end.hear_name()
        for end in self._ends:
            end.session.tell([other.row for other in self._ends if other is not end])
        for end in self._ends:
            end.session.hear()
        _greet(self._ends, self._ends)

    def mend(self, device: int, ssh: Ssh, host: str) -> None:
        """A new end for a device whose own is gone, or that has just come.

        HostError where it does not come about.
        """
        with self._mending:  # two that come at once must know each other
            if device == len(self._ends):
                self._ends.append(self._admitted(device, ssh, host))
            elif not self._ends[device].is_held:
                self._ends[device].close()
                self._ends[device] = self._admitted(device, ssh, host)

    def _admitted(self, device: int, ssh: Ssh, host: str) -> End:
        others = [end for end in self._ends if end.is_held]
        new = self._end(device, ssh, host)
        try:
            new.hear_name()
            new.session.tell([other.row for other in others])
            new.session.hear()
            for other in others:
                with suppress(HostError):  # it is lost itself
                    other.session.tell(new.row)
                    other.session.hear()
            _greet([new], others)
        except HostError:
            new.close()
            raise
        return new

    def _end(self, device: int, ssh: Ssh, host: str) -> End:
        request = {"bits": self._network.prefixlen, "lost_after_s": self._lost_after_s}
        return End(ssh, host, self.address(device), request)

    def beat(self, ended: threading.Event) -> None:
        """Signs of life, without which devices take their ends down."""
        while not ended.wait(self._lost_after_s / 4):
            for end in list(self._ends):
                with suppress(OSError, ValueError):
                    end.session.frames.send(BEAT)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@contextmanager
def veiled(devices: Sequence[Ssh], facts: Sequence[Facts], lost_after_s: float) -> Iterator[Veil]:
    """WireGuard between all devices, as long as the block runs and this process lives."""
    veil, ended = Veil(free_network(facts), lost_after_s), threading.Event()
    hosts = [fact.address(ssh.device) for ssh, fact in zip(devices, facts, strict=True)]
    try:
        veil.begin(list(zip(devices, hosts, strict=True)))
        threading.Thread(target=veil.beat, args=(ended,), daemon=True).start()
        yield veil
    finally:
        ended.set()
        veil.close()


def _greet(ends: Sequence[End], others: Sequence[End]) -> None:
    """Devices that do not get through to each other are named before anything is started."""
    for end in ends:
        end.session.tell({})
    known = {other.address: other for other in others}
    wrong = [
        f"{end.ssh.device.title} gets no answer from {other.ssh.device.title} at "
        f"{other.host}:{other.row['port']} (UDP)"
        for end, silent in [(end, end.session.hear()) for end in ends]
        for other in (known[address] for address in silent)
    ]
    if wrong:
        raise HostError(
            f"the encrypted network does not come about: {'; '.join(wrong)}. Let firewalls pass "
            "UDP between the devices, or leave encrypt out"
        )


def free_network(facts: Sequence[Facts]) -> ipaddress.IPv4Network:
    """Addresses that no device has on any of its interfaces."""
    taken = [
        ipaddress.ip_address(address)
        for fact in facts
        for address in fact.interfaces.values()
        if address
    ]
    for network in NETWORKS:
        if not any(address in network for address in taken):
            return ipaddress.IPv4Network(network)
    raise HostError("no private network is free on all devices for encrypted traffic")

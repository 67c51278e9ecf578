"""The veil over a cluster: WireGuard between its devices, set up before a run and gone after it.

Everything that devices say to each other then travels inside: gloo's connections, our own, and the
store. Their services listen on addresses that exist only there.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from terrazzo.cluster.agent.frames import BEAT
from terrazzo.cluster.inspection import Facts
from terrazzo.cluster.session import Session, session
from terrazzo.cluster.ssh import Ssh
from terrazzo.errors import HostError

NETWORKS = [ipaddress.ip_network(f"10.{second}.77.0/24") for second in range(213, 255)]


@dataclass(frozen=True, slots=True)
class Ends:
    """Where devices are found inside, and the interface that leads there."""

    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]


@contextmanager
def veiled(devices: Sequence[Ssh], facts: Sequence[Facts], lost_after_s: float) -> Iterator[Ends]:
    """WireGuard between all devices, as long as the block runs and this process lives."""
    network = free_network(facts)
    addresses = [str(network[number + 1]) for number in range(len(devices))]
    hosts = [fact.address(ssh.device) for ssh, fact in zip(devices, facts, strict=True)]
    with ExitStack() as cleanup:
        sessions = [
            cleanup.enter_context(
                session(ssh, "veil", address=at, bits=network.prefixlen, lost_after_s=lost_after_s)
            )
            for ssh, at in zip(devices, addresses, strict=True)
        ]
        told = [one.hear() for one in sessions]
        rows = [
            {"key": row["key"], "port": row["port"], "host": host, "address": address}
            for row, host, address in zip(told, hosts, addresses, strict=True)
        ]
        for number, one in enumerate(sessions):
            one.tell([row for other, row in enumerate(rows) if other != number])
        for one in sessions:
            one.hear()
        _greet(devices, sessions, rows)
        ended = threading.Event()
        cleanup.callback(ended.set)
        beat = threading.Thread(target=_beat, args=(sessions, ended, lost_after_s / 4), daemon=True)
        beat.start()
        yield Ends(tuple(addresses), tuple(str(row["name"]) for row in told))


def _greet(devices: Sequence[Ssh], sessions: Sequence[Session], rows: Sequence[Any]) -> None:
    """Devices that do not get through to each other are named before anything is started."""
    for one in sessions:
        one.tell({})
    silent = [one.hear() for one in sessions]
    titles = {row["address"]: ssh.device.title for ssh, row in zip(devices, rows, strict=True)}
    ports = {row["address"]: f"{row['host']}:{row['port']}" for row in rows}
    wrong = [
        f"{ssh.device.title} gets no answer from {titles[address]} at {ports[address]} (UDP)"
        for ssh, found in zip(devices, silent, strict=True)
        for address in found
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


def _beat(sessions: Sequence[Session], ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        for one in sessions:
            with suppress(OSError, ValueError):
                one.frames.send(BEAT)

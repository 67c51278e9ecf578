"""Inspection: what devices say of themselves, and what of it must be put right before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.records import document
from terrazzo.records.cluster import Cluster, ClusterDevice
from terrazzo.records.units import bytes_text, seconds_text

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 6)
LEAST_DISK_BYTES, GOOD_DISK_BYTES = 64 << 20, 1 << 30
GOOD_MEMORY_BYTES = 400 << 20
"""An idle process with torch and its connections takes more than half of that."""
GOOD_CLOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Facts:
    """One device, as its agent found it."""

    python: str
    executable: str
    system: str
    bits: int
    versions: Mapping[str, str]
    cores: int
    memory_bytes: int
    available_bytes: int
    free_bytes: int
    writable: bool
    interfaces: Mapping[str, str]
    reached_at: str
    workdir: str
    is_root: bool
    programs: tuple[str, ...]
    clock_s: float
    """How far its clock is ahead of this machine's."""
    clock_error_s: float

    @classmethod
    def of(cls, body: Mapping[str, Any], *, asked_s: float, answered_s: float) -> Facts:
        with document.reading("answer of a device"):
            return cls(
                python=str(body["python"]),
                executable=str(body["executable"]),
                system=str(body["system"]),
                bits=int(body["bits"]),
                versions={str(key): str(value) for key, value in body["versions"].items()},
                cores=int(body["cores"]),
                memory_bytes=int(body["memory_bytes"]),
                available_bytes=int(body["available_bytes"]),
                free_bytes=int(body["disk"]["free_bytes"]),
                writable=bool(body["disk"]["writable"]),
                interfaces={str(key): str(value) for key, value in body["interfaces"].items()},
                reached_at=str(body["reached_at"]),
                workdir=str(body["workdir"]),
                is_root=bool(body["is_root"]),
                programs=tuple(map(str, body["programs"])),
                clock_s=float(body["time_s"]) - (asked_s + answered_s) / 2,
                clock_error_s=(answered_s - asked_s) / 2,
            )

    def address(self, device: ClusterDevice) -> str:
        """Where the others reach it: as told, of the interface told, or where ssh came in."""
        if device.address:
            return device.address
        if device.interface:
            return self.interfaces.get(device.interface, "")
        return self.reached_at.removeprefix("::ffff:")

    def interface(self, device: ClusterDevice) -> str:
        """The one that has the address."""
        address = self.address(device)
        named = [name for name, found in self.interfaces.items() if found and found == address]
        return device.interface or next(iter(named), "")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a device that a person should know, and what to do about it."""

    device: int
    text: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}"


def findings(cluster: Cluster, facts: Sequence[Facts]) -> list[Finding]:
    """What stands in the way, or will be felt; devices in order, the worst first."""
    found = []
    for number, (device, seen) in enumerate(zip(cluster.devices, facts, strict=True)):
        own = [
            *_software(number, device, seen),
            *_network(number, device, seen),
            *_room(number, device, seen),
            *_clock(number, device, seen),
            *(_encryption(number, device, seen) if cluster.encrypt else ()),
        ]
        found += sorted(own, key=lambda finding: not finding.fatal)
    found += _alike(cluster, facts)
    return found


def _software(number: int, device: ClusterDevice, seen: Facts) -> list[Finding]:
    found = []
    if _version(seen.python) < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        found.append(
            Finding(
                number, f"{device.title} has Python {seen.python}, {least} is needed",
                f'Install a newer one and write python = "..." for {device.name}',
            )
        )  # fmt: skip
    if seen.bits != 64:
        found.append(
            Finding(
                number, f"{device.title} is a {seen.bits}-bit system, for which there is no torch",
                "Install a 64-bit system on it",
            )
        )  # fmt: skip
    missing = [name for name, version in seen.versions.items() if not version]
    if missing:
        found.append(
            Finding(
                number,
                f"{device.title} lacks {', '.join(missing)} in the environment of {device.python}",
                f"Run there: {device.python} -m pip install {' '.join(missing)} (docs/install.md "
                "says which torch), or let terrazzo cluster setup make an environment",
            )
        )
    torch = seen.versions.get("torch", "")
    if torch and _version(torch) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        found.append(
            Finding(
                number, f"{device.title} has torch {torch}, {least} is needed",
                f"Run there: {device.python} -m pip install --upgrade torch",
            )
        )  # fmt: skip
    return found


def _network(number: int, device: ClusterDevice, seen: Facts) -> list[Finding]:
    there = ", ".join(f"{name} ({at or 'no address'})" for name, at in seen.interfaces.items())
    if device.interface and device.interface not in seen.interfaces:
        return [
            Finding(
                number, f"{device.title} has no interface {device.interface}",
                f"Write one of those it has: {there}",
            )
        ]  # fmt: skip
    address = seen.address(device)
    if not address:
        return [
            Finding(
                number, f"{device.title} has no IPv4 address on {device.interface or 'any'}",
                f"Write interface = or address = for it, of: {there}",
            )
        ]  # fmt: skip
    if address not in seen.interfaces.values():
        return [
            Finding(
                number, f"{device.title} does not have the address {address}",
                f"Write interface = or address = for it, of: {there}",
            )
        ]  # fmt: skip
    if device.interface and device.address and seen.interfaces[device.interface] != address:
        return [
            Finding(
                number, f"{device.title} has {address} on {seen.interface(_free(device))}, not on "
                f"{device.interface}", f"Write one of: {there}",
            )
        ]  # fmt: skip
    return []


def _free(device: ClusterDevice) -> ClusterDevice:
    return ClusterDevice(device.name, device.host, address=device.address)


def _room(number: int, device: ClusterDevice, seen: Facts) -> list[Finding]:
    found = []
    if not seen.writable:
        found.append(
            Finding(
                number, f"{device.title} may not write to {device.workdir}",
                'Give it to the user there, or write workdir = "..."',
            )
        )  # fmt: skip
    elif seen.free_bytes < GOOD_DISK_BYTES:
        fatal = seen.free_bytes < LEAST_DISK_BYTES
        wanted = LEAST_DISK_BYTES if fatal else GOOD_DISK_BYTES
        found.append(
            Finding(
                number, f"{device.title} has {bytes_text(seen.free_bytes)} free at "
                f"{device.workdir}, {bytes_text(wanted)} {'are needed' if fatal else 'are better'}",
                'Make room, or write workdir = "..." on another disk', fatal=fatal,
            )
        )  # fmt: skip
    if device.memory_bytes > seen.memory_bytes > 0:
        found.append(
            Finding(
                number, f"{device.title} has {bytes_text(seen.memory_bytes)} of memory, its limit "
                f"says {bytes_text(device.memory_bytes)}", "Write less as memory =",
            )
        )  # fmt: skip
    if 0 < seen.available_bytes < GOOD_MEMORY_BYTES:
        found.append(
            Finding(
                number, f"{device.title} has {bytes_text(seen.available_bytes)} of memory free, "
                f"{bytes_text(GOOD_MEMORY_BYTES)} are better", "End what else runs there",
                fatal=False,
            )
        )  # fmt: skip
    return found


def _clock(number: int, device: ClusterDevice, seen: Facts) -> list[Finding]:
    if abs(seen.clock_s) <= GOOD_CLOCK_S + seen.clock_error_s:
        return []
    side = "ahead of" if seen.clock_s > 0 else "behind"
    return [
        Finding(
            number, f"{device.title} has a clock {seconds_text(abs(seen.clock_s))} {side} this "
            "one: reports would mix up when things happened",
            "Run there: sudo timedatectl set-ntp true", fatal=False,
        )
    ]  # fmt: skip


def _encryption(number: int, device: ClusterDevice, seen: Facts) -> list[Finding]:
    """WireGuard's tools, and the right to use them."""
    missing = [name for name in ("ip", "wg") if name not in seen.programs]
    if missing:
        return [
            Finding(
                number, f"{device.title} lacks {' and '.join(missing)}, which encrypt = true needs",
                "Run there: sudo apt install wireguard-tools iproute2, or leave encrypt out",
            )
        ]  # fmt: skip
    if not seen.is_root and "sudo" not in seen.programs:
        return [
            Finding(
                number, f"{device.title} has neither root nor sudo, which encrypt = true needs",
                "Let the user there run ip and wg by sudo without a password, or leave encrypt out",
            )
        ]  # fmt: skip
    return []


def _alike(cluster: Cluster, facts: Sequence[Facts]) -> list[Finding]:
    """Devices that must have the same torch: others export other graphs."""
    first = facts[0].versions.get("torch", "")
    return [
        Finding(
            number,
            f"{cluster.devices[number].title} has torch {torch}, "
            f"{cluster.devices[0].title} has {first}: they may cut a model differently",
            f"Run there: {cluster.devices[number].python} -m pip install torch=={_plain(first)}",
        )
        for number, seen in enumerate(facts)
        if (torch := seen.versions.get("torch", "")) and first
        and _version(torch) != _version(first)
    ]  # fmt: skip


def _plain(version: str) -> str:
    return version.partition("+")[0]


def _version(text: str) -> tuple[int, ...]:
    """Major and minor."""
    parts = _plain(text).split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)

"""Verification: what devices really do, measured inside them, against what they shall do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrazzo.lab.calibrate import compute_rates
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.network import SWITCH_ADDRESS
from terrazzo.lab.probes import Probe, Probes

TOLERANCE = 0.1
COUNTER_TOLERANCE = 0.05
"""Headers alone are 4.6% on full frames; what receivers confirm is counted the other way."""
SKIP_S = 0.3
"""A flow starts with what its buckets hold and needs a moment to come up to speed."""
FILL_OVER = 1.2


@dataclass(frozen=True, slots=True)
class Figure:
    """One number against the one asked for; without a wish it is shown and not judged."""

    what: str
    unit: str
    scale: float
    seen: float
    wanted: float | None
    tolerance: float = TOLERANCE

    @property
    def error(self) -> float | None:
        return None if not self.wanted else self.seen / self.wanted - 1

    @property
    def ok(self) -> bool:
        return self.error is None or abs(self.error) <= self.tolerance

    def __str__(self) -> str:
        wanted = f", {self.wanted / self.scale:.4g} asked for" if self.wanted else ""
        return f"{self.what} {self.seen / self.scale:.4g} {self.unit}{wanted}"


@dataclass(frozen=True, slots=True)
class Verification:
    """Figures by device, and those of the cluster as a whole."""

    names: tuple[str, ...]
    devices: tuple[tuple[Figure, ...], ...]
    together: tuple[Figure, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        found = [
            f"{name}: {figure}"
            for name, figures in zip(self.names, self.devices, strict=True)
            for figure in figures
            if not figure.ok
        ]
        return (*found, *(f"all devices: {figure}" for figure in self.together if not figure.ok))


@dataclass(frozen=True, slots=True)
class Flow:
    """What one connection carried."""

    bits_per_s: float
    payload_bytes: float


def verify(
    hosts: LabHosts,
    probes: Probes,
    *,
    seconds: float = 1.5,
    tolerance: float = TOLERANCE,
    seen_flops_per_s: Sequence[float] | None = None,
    memory: bool = True,
) -> Verification:
    """Measures all devices at once: computing, sending, receiving, answering, filling memory."""
    seen = seen_flops_per_s or compute_rates(hosts, probes, 2 * seconds)
    columns: list[list[Figure]] = [
        [Figure("compute", "GFLOP/s", 1e9, rate, device.flops_per_s, tolerance)]
        for rate, device in zip(seen, hosts.topology.devices, strict=True)
    ]
    if hosts.topology.air_bits_per_s is None:
        together = _wires(hosts, probes, columns, seconds=seconds, tolerance=tolerance)
    else:
        together = _air(hosts, probes, columns, seconds=seconds, tolerance=tolerance)
    delays = [device.link.delay_s for device in hosts.topology.devices]
    for figures, trip_s, delay_s in zip(columns, round_trips(probes), delays, strict=True):
        # Shown, not judged: without netem there is no delay to hold to a tolerance.
        figures.append(Figure("round trip", "ms", 1e-3, trip_s, 2 * delay_s, float("inf")))
    if memory:
        _memory(hosts, probes, columns, tolerance)
    return Verification(hosts.names, tuple(map(tuple, columns)), tuple(together))


# ---- links ----------------------------------------------------------------------------------


def _wires(
    hosts: LabHosts,
    probes: Probes,
    columns: list[list[Figure]],
    *,
    seconds: float,
    tolerance: float,
) -> list[Figure]:
    """Each device with the switch: first all send, then all receive. Counters are compared too."""
    counts = [_traffic(hosts)]
    up = flows(_pairs(probes.inside, probes.switch, [SWITCH_ADDRESS] * len(columns)), seconds)
    counts.append(_traffic(hosts))
    rates = [device.link.bits_per_s for device in hosts.topology.devices]
    down = flows(_pairs(probes.switch, probes.inside, _addresses(hosts)), seconds, rates)
    counts.append(_traffic(hosts))
    devices = zip(columns, hosts.topology.devices, up, down, strict=True)
    for figures, device, sent, received in devices:
        rate = device.link.bits_per_s
        figures.append(Figure("up", "Mbit/s", 1e6, sent.bits_per_s, rate, tolerance))
        figures.append(Figure("down", "Mbit/s", 1e6, received.bits_per_s, rate, tolerance))
    counted = [after[0] - before[0] for before, after in zip(*counts[:2], strict=True)]
    counted += [after[1] - before[1] for before, after in zip(*counts[1:], strict=True)]
    payload = sum(flow.payload_bytes for flow in (*up, *down))
    return [Figure("interface counters", "MB", 1e6, sum(counted), payload, COUNTER_TOLERANCE)]


def _traffic(hosts: LabHosts) -> list[tuple[int, int]]:
    found = [hosts.traffic(device) for device in range(len(hosts.names))]
    return [(traffic.sent_bytes, traffic.received_bytes) for traffic in found]


def _air(
    hosts: LabHosts,
    probes: Probes,
    columns: list[list[Figure]],
    *,
    seconds: float,
    tolerance: float,
) -> list[Figure]:
    """All devices in a ring, each sending to the next: together they get what the air carries."""
    around = _addresses(hosts)
    ring = [*range(1, len(around)), 0]
    pairs = [(probes.inside[i], probes.beside[j], around[j]) for i, j in enumerate(ring)]
    found = flows(pairs, seconds)
    for figures, flow in zip(columns, found, strict=True):
        figures.append(Figure("its part of the air", "Mbit/s", 1e6, flow.bits_per_s, None))
    total = sum(flow.bits_per_s for flow in found)
    return [Figure("air", "Mbit/s", 1e6, total, hosts.topology.air_bits_per_s, tolerance)]


def flows(
    pairs: Sequence[tuple[Probe, Probe, str]],
    seconds: float,
    bits_per_s: Sequence[float] | None = None,
) -> list[Flow]:
    """Long flows from sender to receiver at its address, all at once.

    A sender at the switch, which has links of several rates behind it, is told its receiver's.
    """
    rates = bits_per_s or [0.0] * len(pairs)
    ports = [_ask(receiver, "listen")["port"] for _, receiver, _ in pairs]
    for _, receiver, _ in pairs:
        receiver.ask("receive", skip_s=SKIP_S, seconds=seconds)
    for (sender, _, address), port, rate in zip(pairs, ports, rates, strict=True):
        whole_s = seconds + 2 * SKIP_S
        sender.ask("send", address=address, port=port, seconds=whole_s, bits_per_s=rate)
    for sender, _, _ in pairs:
        sender.answer()
    found = [receiver.answer() for _, receiver, _ in pairs]
    return [Flow(answer["bits_per_s"], answer["bytes"]) for answer in found]


def round_trips(probes: Probes) -> list[float]:
    """Seconds that a small message takes to the switch and back, from each device."""
    ports = [_ask(probe, "listen")["port"] for probe in probes.switch]
    for probe in probes.switch:
        probe.ask("echo")
    for probe, port in zip(probes.inside, ports, strict=True):
        probe.ask("ping", address=SWITCH_ADDRESS, port=port)
    found = [probe.answer()["round_trip_s"] for probe in probes.inside]
    for probe in probes.switch:
        probe.answer()
    return found


def _pairs(
    senders: Sequence[Probe], receivers: Sequence[Probe], addresses: Sequence[str]
) -> list[tuple[Probe, Probe, str]]:
    return list(zip(senders, receivers, addresses, strict=True))


def _addresses(hosts: LabHosts) -> list[str]:
    return [device.address for device in hosts.topology.devices]


# ---- memory ---------------------------------------------------------------------------------


def _memory(hosts: LabHosts, probes: Probes, columns: list[list[Figure]], tolerance: float) -> None:
    """How much each device gives before the kernel ends who asks for more."""
    held = [hosts.usage(device).memory_bytes for device in range(len(hosts.names))]
    with hosts.full_speed():
        for probe, device in zip(probes.inside, hosts.topology.devices, strict=True):
            probe.ask("fill", limit_bytes=round(device.memory_bytes * FILL_OVER))
        found = [probe.answer() for probe in probes.inside]
    devices = zip(columns, found, held, hosts.topology.devices, strict=True)
    for figures, answer, before, device in devices:
        reached = float(before + answer["bytes"])
        figures.append(Figure("memory", "MiB", 2**20, reached, device.memory_bytes, tolerance))


def _ask(probe: Probe, do: str) -> dict[str, int]:
    probe.ask(do)
    return probe.answer()


def headings(found: Verification) -> Iterator[str]:
    """The names of a device's figures, with their units."""
    return (f"{figure.what}, {figure.unit}" for figure in found.devices[0])

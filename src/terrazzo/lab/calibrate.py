"""Calibration: which share of this machine makes a device compute at its preset's rate.

A first guess comes from one core of this machine, measured over processor time. Then all devices
compute at once, and each share is corrected by what came out: what they take from each other
(caches, clocks, the kernel's own work) is in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.probes import Probe, Probes
from terrazzo.lab.quota import threads_of

FIRST_S, ROUND_S = 0.5, 1.0
ROUNDS = 5
CLOSE = 0.02
"""Near enough to stop: a tolerance of 10% leaves room for a busier moment."""
LARGEST_CORRECTION = 1.25


@dataclass(frozen=True, slots=True)
class Calibration:
    """This machine, and the shares of it that were found."""

    core_flops_per_s: float
    shares: tuple[float, ...]
    seen_flops_per_s: tuple[float, ...]


def calibrate(hosts: LabHosts, probes: Probes) -> Calibration:
    """Throttles each device to its preset's rate; refused where this machine is too small."""
    wanted = [device.flops_per_s for device in hosts.topology.devices]
    core = core_rate(probes.inside[0])
    shares = [rate / core for rate in wanted]
    hosts.throttle(shares)
    for _ in range(ROUNDS):
        seen = compute_rates(hosts, probes, ROUND_S)
        if all(abs(s / w - 1) <= CLOSE for s, w in zip(seen, wanted, strict=True)):
            break
        shares = [
            share * _correction(s, w) for share, s, w in zip(shares, seen, wanted, strict=True)
        ]
        hosts.throttle(shares)
    else:
        seen = compute_rates(hosts, probes, ROUND_S)
    return Calibration(core, tuple(shares), tuple(seen))


def core_rate(probe: Probe) -> float:
    """What one core of this machine does, over the time it really had."""
    probe.ask("compute", seconds=FIRST_S, threads=1)
    found = probe.answer()
    return float(found["flops"] / found["cpu_s"])


def compute_rates(hosts: LabHosts, probes: Probes, seconds: float) -> list[float]:
    """Operations a second in each device, all of them computing at once."""
    devices = zip(probes.inside, hosts.shares, hosts.topology.devices, strict=True)
    for probe, share, device in devices:
        probe.ask("compute", seconds=seconds, threads=threads_of(share, device.threads))
    return [found["flops"] / found["wall_s"] for found in _answers(probes.inside)]


def _answers(probes: Sequence[Probe]) -> list[dict[str, float]]:
    return [probe.answer() for probe in probes]


def _correction(seen: float, wanted: float) -> float:
    return min(LARGEST_CORRECTION, max(1 / LARGEST_CORRECTION, wanted / seen))

"""Calibration: which share of this machine makes a device compute at its preset's rate.

A first guess comes from one core of this machine, measured over processor time. Then all devices
compute at once, and the shares are corrected by what came out: what they take from each other
(caches, clocks, the kernel's own work) is in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.probes import Probe, Probes

FIRST_S, ROUND_S = 0.5, 1.2
ROUNDS = 4
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
    for attempt in range(ROUNDS + 1):
        seen = compute_rates(hosts, probes, ROUND_S)
        factors = _corrections(hosts, seen)
        if attempt == ROUNDS or all(abs(factor - 1) <= CLOSE for factor in factors):
            break
        shares = [share * factor for share, factor in zip(shares, factors, strict=True)]
        hosts.throttle(shares)
    return Calibration(core, tuple(shares), tuple(seen))


def core_rate(probe: Probe) -> float:
    """What one core of this machine does, over the time it really had."""
    probe.ask("compute", seconds=FIRST_S, threads=1)
    found = probe.answer()
    return float(found["flops"] / found["cpu_s"])


def compute_rates(hosts: LabHosts, probes: Probes, seconds: float) -> list[float]:
    """Operations a second in each device, all of them computing at once."""
    for device, probe in enumerate(probes.inside):
        probe.ask("compute", seconds=seconds, threads=hosts.threads(device))
    return [found["flops"] / found["wall_s"] for found in _answers(probes.inside)]


def _answers(probes: Sequence[Probe]) -> list[dict[str, float]]:
    return [probe.answer() for probe in probes]


def _corrections(hosts: LabHosts, seen: Sequence[float]) -> list[float]:
    """One factor for all devices of a kind: between them only chance differs."""
    devices = hosts.topology.devices
    ratios: dict[str, list[float]] = {}
    for device, rate in zip(devices, seen, strict=True):
        ratios.setdefault(device.preset, []).append(rate / device.flops_per_s)
    limits = (1 / LARGEST_CORRECTION, LARGEST_CORRECTION)
    factors = {kind: 1 / fmean(found) for kind, found in ratios.items()}
    return [min(limits[1], max(limits[0], factors[device.preset])) for device in devices]

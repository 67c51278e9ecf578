"""Starting a lab for use: made, calibrated, checked, and honest about what it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terrazzo.cluster.hosts import available_cores
from terrazzo.errors import LabError
from terrazzo.lab import vectors
from terrazzo.lab.calibrate import Calibration, calibrate
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.probes import Probes
from terrazzo.lab.topology import Topology
from terrazzo.lab.verify import TOLERANCE, verify

SHORT_S = 0.5
LOOKS = 3
"""At a lab before it is refused: a shared machine's disturbances last for some seconds."""


@contextmanager
def started(
    topology: Topology,
    *,
    say: Callable[[str], None],
    check: bool = True,
    tolerance: float = TOLERANCE,
    storage: Path | None = None,
    threads: int = 0,
) -> Iterator[LabHosts]:
    """A lab that computes and sends at its presets' rates, or a refusal that says by how much not.

    ``storage`` is a path on the disk that devices shall find slow; ``threads`` are those of each
    device, 0 for as many as its share of this machine has cores.
    """
    with LabHosts.open(topology) as hosts:
        hosts.use_threads(threads)
        with Probes.start(hosts) as probes:
            found = calibrate(hosts, probes)
            if check:
                _require(hosts, probes, found, tolerance=tolerance, say=say)
        say(emulated(hosts, checked=check))
        say(not_emulated(hosts))
        if storage is not None:
            say(hosts.slow_storage(storage))
        for device in range(len(hosts.names)):
            hosts.reset_peak(device)
        yield hosts


def _require(
    hosts: LabHosts,
    probes: Probes,
    found: Calibration,
    *,
    tolerance: float,
    say: Callable[[str], None],
) -> None:
    """A short look; a lab that was disturbed is calibrated anew and looked at again."""
    for look in range(1, LOOKS + 1):
        checked = verify(
            hosts,
            probes,
            seconds=SHORT_S,
            tolerance=tolerance,
            seen_flops_per_s=found.seen_flops_per_s,
            memory=False,
        )
        if checked.ok:
            return
        problems = checked.problems
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        seen = f"the lab is outside its tolerance of {tolerance:.0%}: {problems[0]}{more}"
        if look < LOOKS:
            say(f"{seen}; calibrating again, {LOOKS - look} more to go")
            found = calibrate(hosts, probes)
    raise LabError(
        f"{seen}. Something else may be using this machine: end it, ask for fewer devices, or go "
        "on with --no-verify"
    )


def emulated(hosts: LabHosts, *, checked: bool) -> str:
    """What was made, in one line."""
    devices, shares = hosts.topology.devices, hosts.shares
    air = hosts.topology.air_bits_per_s
    link = (
        f"{air / 1e6:.4g} Mbit/s of air for all together"
        if air
        else f"{_range([device.link.bits_per_s / 1e6 for device in devices])} Mbit/s each way"
    )
    widths = {device.vector_bits for device in devices if vectors.environment(device.vector_bits)}
    narrow = f" with vectors of {' and '.join(map(str, sorted(widths)))} bits" if widths else ""
    return (
        f"lab {hosts.topology.description}: {_range([d.flops_per_s / 1e9 for d in devices])} "
        f"GFLOP/s ({_range(shares)} of a core{narrow}), "
        f"{_range([d.memory_bytes / 2**20 for d in devices])} MiB, {link}"
        f"{'' if checked else '; not checked'}"
    )


def not_emulated(hosts: LabHosts) -> str:
    """What quotas and shapers can't do, in one line."""
    most = max(device.threads for device in hosts.topology.devices)
    missing = ["memory bandwidth and caches", "the boards' instruction set", "a GPU"]
    used = max(map(hosts.threads, range(len(hosts.names))))
    if hosts.given_threads > 1:
        missing.insert(1, "the rate of a single core (one thread may use what the others leave)")
    elif used < most:
        missing.insert(1, f"{most} cores a device ({used} thread{'s' * (used > 1)} here)")
    if not hosts.network.has_netem:
        missing.append("link delay and loss (this kernel has no netem)")
    return f"not emulated: {', '.join(missing)}"


def unshaped(topology: Topology, reason: str) -> str:
    """What is missing when devices are plain processes."""
    count, cores = len(topology.devices), available_cores()
    return (
        f"{reason}: {count} devices of {topology.description} run as local processes on {cores} "
        "cores; NOT emulated: compute rate, link rate, delay, memory limit, separate hosts"
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in _ends(values))
    return low if low == high else f"{low} to {high}"

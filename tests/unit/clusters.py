"""Made-up clusters: profiles whose figures are known, for planning without devices."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.records.machine import Machine
from terrazzo.records.profile import (
    DeviceProfile,
    LinkProfile,
    Load,
    Network,
    Own,
    Profile,
    Timing,
)

MACHINE = Machine("Linux 6 x86_64", "a board", 4, 1 << 30, "3.11.2", "2.13.0", "0.1.0")
GFLOPS = 7e9
OWN = Own(
    {"Operator": (1e-4, 1e-4), "Compute": (5e-4, 5e-4),
     "Combine": (2e-3, 1e-3), "Exchange": (2e-3, 2e-3),
     "Summed": (0.0, 1e-3), "Spread": (1e-4, 1e-4), "Take": (1e-4, 0.0)},
    net_s=1e-2,
)  # fmt: skip
"""What the runtime itself takes; nothing for each weight, so that it is the same for all plans."""


def timings(flops_per_s: float) -> tuple[Timing, ...]:
    """Arithmetic at one rate, elements at a twentieth of it, a call: all in straight lines."""
    loads = [
        Load(f"conv2d {side}x{side} s{stride}", rows, side**2 * inputs, outputs, rows * inputs,
             rows * outputs, side**2)
        for side, stride in ((1, 1), (3, 1), (3, 2), (7, 2))
        for rows, inputs, outputs in ((43264, 32, 64), (2704, 128, 256), (676, 256, 512),
                                      (100, 256, 512), (676, 64, 64), (676, 64, 8))
    ]  # fmt: skip
    loads += [Load("relu", rows, 0, 64, 64 * rows, 64 * rows) for rows in (10, 1000, 40000)]
    found = []
    for load in loads:
        elements_s = (load.reads + load.writes) * 2.0 / flops_per_s
        seconds = load.flops / flops_per_s + elements_s + 1e-4
        found.append(Timing(load, seconds, seconds, seconds if load.is_product else None))
    return tuple(found)


def device(name: str, flops_per_s: float = GFLOPS, memory_bytes: int = 900 << 20) -> DeviceProfile:
    return DeviceProfile(
        name, MACHINE, "", 1, memory_bytes, 7.0, (4e-5, 4e-5), 1e9, 1e-9,
        {"sgd": 3e-9, "momentum": 6e-9, "adam": 2e-8}, timings(flops_per_s), own=OWN,
    )  # fmt: skip


def profile(
    speeds: int | Sequence[float],
    *,
    mbit_per_s: float = 94.0,
    latency_s: float = 1e-3,
    shared: bool = False,
    cpu_s_per_byte: float = 2e-9,
    memory_bytes: int = 900 << 20,
) -> Profile:
    """Devices of 7 GFLOP/s (or of these rates), each with a link of its own or one for all."""
    rates = [GFLOPS] * speeds if isinstance(speeds, int) else list(speeds)
    rate = mbit_per_s * 1e6 / 8
    count = len(rates)
    link = LinkProfile(rate, rate, latency_s, cpu_s_per_byte, 5e-5, cpu_s_per_byte)
    together = rate if shared else rate * count
    network = Network((link,) * count, shared, rate, together, ())
    return Profile(
        {"devices": f"{count} made up"},
        tuple(device(f"d{i}", speed, memory_bytes) for i, speed in enumerate(rates)),
        network if count > 1 else None,
        0.0,
    )

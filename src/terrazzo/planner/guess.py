"""A guess: a profile of devices that nobody measured, from four figures of each.

Better than nothing where a plan is wanted before the devices are there; everything in it that was
not given is written down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.records.machine import Machine
from terrazzo.records.profile import DeviceProfile, LinkProfile, Load, Network, Own, Profile, Timing

ELEMENT_FLOPS, COPY_FLOPS = 50.0, 8.0
"""An element that an activation, norm or pool reads or writes takes as long as so many operations
of a convolution, and so does one that is copied. These and the figures below lie between those of
two profiles of emulated Pi 3 (50 to 92 and 5 to 11 here), or at the end that is nearer to boards
on which pools and statistics have become faster since."""
PRODUCT_ELEMENT_FLOPS = 4.0
"""The same for what a convolution reads and writes. An estimate."""
CALL_FLOPS = 2.2e5
"""So does a call, however small."""
CORE_FLOPS_PER_S = 5.3e10
"""A core on which a message takes ``MESSAGE_S`` and a byte ``BYTE_S`` of processor time."""
MESSAGE_S, BYTE_S = 2e-4, 3e-9
LATENCY_S = 4e-4
OWN_CALLS = {
    "Operator": 3,
    "Compute": 15,
    "Combine": 40,
    "Exchange": 55,
    "Spread": 5,
    "Summed": 40,
    "Take": 5,
}
NET_CALLS, WEIGHT_CALLS = 400, 10
"""What the runtime itself takes, in such calls: a step, one way; a training step; a weight.
Round figures from steps of small networks."""
UPDATE_FLOPS = {"sgd": 15.0, "momentum": 33.0, "adam": 130.0}
KERNELS = ((1, 1), (3, 1), (3, 2), (7, 2))
SIZES = ((43264, 32, 64), (2704, 128, 256), (676, 256, 512), (100, 256, 512), (676, 64, 8))


@dataclass(frozen=True, slots=True)
class Figures:
    """What somebody says of a device."""

    name: str
    flops_per_s: float
    memory_bytes: int
    bytes_per_s: float
    latency_s: float = LATENCY_S


def guessed(devices: Sequence[Figures], *, air_bytes_per_s: float | None = None) -> Profile:
    """A profile in straight lines; ``air_bytes_per_s`` is what all share, if they share it."""
    links = tuple(
        LinkProfile(d.bytes_per_s, d.bytes_per_s, d.latency_s, BYTE_S, MESSAGE_S, BYTE_S)
        for d in devices
    )
    together = air_bytes_per_s or sum(d.bytes_per_s for d in devices)
    network = Network(
        links=links,
        shared=air_bytes_per_s is not None,
        alone_bytes_per_s=max(d.bytes_per_s for d in devices),
        together_bytes_per_s=together,
        sums_s=(),
    )
    return Profile(
        key={"devices": f"{len(devices)} guessed"},
        devices=tuple(_device(figures) for figures in devices),
        network=network if len(devices) > 1 else None,
        measured_s=0.0,
    )


def is_guess(profile: Profile) -> bool:
    return profile.measured_s == 0.0


def _device(figures: Figures) -> DeviceProfile:
    rate = figures.flops_per_s
    return DeviceProfile(
        name=figures.name,
        machine=Machine("", "guessed", 1, figures.memory_bytes, "", "", ""),
        power="guessed",
        threads=1,
        memory_bytes=figures.memory_bytes,
        seconds_per_cpu_s=max(1.0, CORE_FLOPS_PER_S / rate),
        calls_s=(CALL_FLOPS / rate, CALL_FLOPS / rate),
        copy_bytes_per_s=4 * rate / COPY_FLOPS,
        fresh_s_per_byte=0.0,
        update_s_per_element={name: flops / rate for name, flops in UPDATE_FLOPS.items()},
        timings=tuple(_timing(load, rate) for load in _loads()),
        own=Own(
            {kind: (float(calls), float(calls)) for kind, calls in OWN_CALLS.items()},
            NET_CALLS,
            WEIGHT_CALLS,
        ).stretched(CALL_FLOPS / rate),
    )


def _loads() -> list[Load]:
    products = [
        Load(
            family=f"conv2d {side}x{side} s{stride}",
            rows=rows,
            inner=side**2 * inputs,
            outer=outputs,
            reads=rows * inputs,
            writes=rows * outputs,
            window=side**2,
        )
        for side, stride in KERNELS
        for rows, inputs, outputs in SIZES
    ]
    return products + [Load("relu", rows, 0, 64, 64 * rows, 64 * rows) for rows in (10, 10**4)]


def _timing(load: Load, rate: float) -> Timing:
    each = PRODUCT_ELEMENT_FLOPS if load.is_product else ELEMENT_FLOPS
    moved = each * (load.reads + load.writes)
    seconds = (load.flops + moved + CALL_FLOPS) / rate
    return Timing(load, seconds, seconds, seconds if load.is_product else None)

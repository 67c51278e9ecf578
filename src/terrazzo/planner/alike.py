"""Alike: devices of one kind are planned as equals.

Boards of one make differ by about one percent. What a minute of measuring says of them differs by
more, because something else was running on one of them, and a plan that follows such differences
gives equal devices unequal work. So devices that are the same machine, and were measured to be
nearly as fast, count as what they were in the middle: for every box, and for all that a device does
besides. Boxes that only some had time for then count for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from terrazzo.records.profile import DeviceProfile, Load, Profile, Timing

NEAR = 0.15
"""By so much at most the fastest of a kind was measured to be faster than its slowest. A device
that is slower than that is hot, or busy, and planned as such."""


def levelled(profile: Profile) -> Profile:
    """The same devices, equal where they are of one kind."""
    devices = list(profile.devices)
    for kind in _kinds(devices):
        if len(kind) > 1:
            figures = _middle([devices[place] for place in kind])
            for place in kind:
                devices[place] = replace(devices[place], **figures)
    return replace(profile, devices=tuple(devices))


def speed(device: DeviceProfile) -> float:
    """Operations a second over all products that were timed, in all directions."""
    flops = seconds = 0.0
    for timing in device.timings:
        for took_s in (timing.forward_s, timing.backward_input_s, timing.backward_weight_s):
            if timing.load.is_product and took_s is not None:
                flops, seconds = flops + timing.load.flops, seconds + took_s
    return flops / seconds if seconds else 0.0


def _kinds(devices: Sequence[DeviceProfile]) -> list[list[int]]:
    """Places of devices, those together that are the same machine and nearly as fast."""
    shared = set.intersection(*({timing.load for timing in device.timings} for device in devices))
    speeds = [_speed_over(device, shared) for device in devices]
    kinds: list[list[int]] = []
    for place in sorted(range(len(devices)), key=speeds.__getitem__):
        same = (
            kind
            for kind in kinds
            if _make(devices[kind[0]]) == _make(devices[place])
            and speeds[place] <= (1 + NEAR) * speeds[kind[0]]
        )
        kind = next(same, None)
        if kind is None:
            kinds.append([place])
        else:
            kind.append(place)
    return kinds


def _speed_over(device: DeviceProfile, shared: set[Load]) -> float:
    """Its speed over the boxes that all were measured with: others would compare unlike work."""
    same = tuple(timing for timing in device.timings if timing.load in shared)
    return speed(replace(device, timings=same)) or speed(device)


def _make(device: DeviceProfile) -> tuple[object, ...]:
    return device.machine, device.threads, device.power


def _middle(devices: Sequence[DeviceProfile]) -> dict[str, Any]:
    """What devices of one kind do, by field; names, memory and watts stay each one's own."""
    forward_s, backward_s = zip(*(device.calls_s for device in devices), strict=True)
    optimisers = {name for device in devices for name in device.update_s_per_element}
    return {
        "seconds_per_cpu_s": median(device.seconds_per_cpu_s for device in devices),
        "calls_s": (median(forward_s), median(backward_s)),
        "copy_bytes_per_s": median(device.copy_bytes_per_s for device in devices),
        "fresh_s_per_byte": median(device.fresh_s_per_byte for device in devices),
        "update_s_per_element": {
            name: _median(device.update_s_per_element.get(name) for device in devices) or 0.0
            for name in sorted(optimisers)
        },
        "timings": _timings(devices),
    }


def _timings(devices: Sequence[DeviceProfile]) -> tuple[Timing, ...]:
    found: dict[Load, list[Timing]] = {}
    for device in devices:
        for timing in device.timings:
            found.setdefault(timing.load, []).append(timing)
    return tuple(
        Timing(
            load,
            median(timing.forward_s for timing in timings),
            _median(timing.backward_input_s for timing in timings),
            _median(timing.backward_weight_s for timing in timings),
        )
        for load, timings in found.items()
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

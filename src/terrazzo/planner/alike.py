"""Alike: devices of one kind are planned as equals.

Boards of one make differ by about one percent. What a minute of measuring says of them differs by
more, because something else was running on one of them, and a plan that follows such differences
gives equal devices unequal work. So devices that are the same machine, and were measured to be
nearly as fast, count as what they were in the middle: for every box, and for all that a device does
besides. Boxes that only some had time for then count for all.

How slow a device is beside others of its make is the middle of how much longer it took for each box
that all of them have timed. A sum over boxes would follow the longest, which one disturbance
spoils. A device that is really slower, hot or emulated to be, may have timed only its share of the
boxes: what others of its make have timed counts for it too, so much longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from statistics import median
from typing import Any

from terrazzo.records.profile import DeviceProfile, LinkProfile, Load, Own, Profile, Timing

UPDATES = ("sgd", "momentum", "adam")
NEAR = 0.15
"""By so much at most the fastest of a kind was measured to be faster than its slowest. A device
that is slower than that is hot, or busy, and planned as such."""


def levelled(profile: Profile) -> Profile:
    """The same devices, equal where they are of one kind."""
    devices, network = list(profile.devices), profile.network
    links = list(network.links) if network is not None else []
    for make in _makes(devices):
        found = [profile.devices[place] for place in make]
        paces = _paces(found)
        for kind in _kinds(paces) if len(make) > 1 else ():
            pace, figures = median(paces[place] for place in kind), _middle(_some(found, kind))
            timings = tuple(_known(found, kind, paces, pace).values())
            for place in kind:
                whose = make[place]
                devices[whose] = replace(devices[whose], **figures, timings=timings)
            if network is not None:
                work = _handling([network.links[make[place]] for place in kind])
                for place in kind:
                    links[make[place]] = replace(links[make[place]], **work)
    network = None if network is None else replace(network, links=tuple(links))
    return replace(profile, devices=tuple(devices), network=network)


def speed(device: DeviceProfile) -> float:
    """Operations a second over all products that were timed, in all directions."""
    flops = seconds = 0.0
    for timing in device.timings:
        for took_s in (timing.forward_s, timing.backward_input_s, timing.backward_weight_s):
            if timing.load.is_product and took_s is not None:
                flops, seconds = flops + timing.load.flops, seconds + took_s
    return flops / seconds if seconds else 0.0


def _makes(devices: Sequence[DeviceProfile]) -> list[list[int]]:
    """Places of devices that are the same machine."""
    found: dict[tuple[object, ...], list[int]] = {}
    for place, device in enumerate(devices):
        make = device.machine, device.threads, device.power, device.accelerator
        found.setdefault(make, []).append(place)
    return list(found.values())


def _paces(devices: Sequence[DeviceProfile]) -> list[float]:
    """How long each takes, beside the others, for what all of them have timed.

    Where they have timed no box that all have, it is what every device does besides: small calls,
    copies, weights that are updated. Their own boxes would say how large these are.
    """
    known = [{timing.load: timing for timing in device.timings} for device in devices]
    common = set.intersection(*map(set, known))
    boxes = [[s for load in common for s in _directions(timings[load])] for timings in known]
    return _beside(boxes) or _beside(list(map(_basics, devices))) or [1.0] * len(devices)


def _beside(rows: Sequence[Sequence[float | None]]) -> list[float]:
    """By device, the middle of how much longer it took than usual; nothing if nothing is known."""
    known = [found for found in zip(*rows, strict=True) if all(found)]
    usual = [median(found) for found in known]
    by_device = list(zip(*known, strict=True))
    return [median(map(truediv, took, usual)) for took in by_device]


def _basics(device: DeviceProfile) -> list[float | None]:
    """Seconds that every device has measured, whatever it had time for."""
    copied_s = 1.0 / device.copy_bytes_per_s if device.copy_bytes_per_s else None
    updates = (device.update_s_per_element.get(name) for name in UPDATES)
    return [*device.calls_s, copied_s, *updates]


def _kinds(paces: Sequence[float]) -> list[list[int]]:
    """Places of those that are nearly as fast, from the slowest on."""
    kinds: list[list[int]] = []
    for place in sorted(range(len(paces)), key=lambda place: -paces[place]):
        if kinds and paces[kinds[-1][0]] <= (1 + NEAR) * paces[place]:
            kinds[-1].append(place)
        else:
            kinds.append([place])
    return [sorted(kind) for kind in kinds]


def _some(devices: Sequence[DeviceProfile], places: Iterable[int]) -> list[DeviceProfile]:
    return [devices[place] for place in places]


def _known(
    devices: Sequence[DeviceProfile], kind: Sequence[int], paces: Sequence[float], pace: float
) -> Mapping[Load, Timing]:
    """All boxes that devices of one make have timed, as one kind among them takes them."""
    others = [
        replace(device, timings=tuple(t.stretched(pace / paces[place]) for t in device.timings))
        for place, device in enumerate(devices)
        if place not in kind
    ]
    return {**_timings(others), **_timings(_some(devices, kind))}


def _middle(devices: Sequence[DeviceProfile]) -> dict[str, Any]:
    """What devices of one kind do, by field; names, memory and watts stay each one's own."""
    forward_s, backward_s = zip(*(device.calls_s for device in devices), strict=True)
    optimisers = {name for device in devices for name in device.update_s_per_element}
    return {
        "seconds_per_cpu_s": median(device.seconds_per_cpu_s for device in devices),
        "calls_s": (median(forward_s), median(backward_s)),
        "copy_bytes_per_s": median(device.copy_bytes_per_s for device in devices),
        "fresh_s_per_byte": median(device.fresh_s_per_byte for device in devices),
        "saved_s": median(device.saved_s for device in devices),
        "own": _own([device.own for device in devices]),
        "update_s_per_element": {
            name: _median(device.update_s_per_element.get(name) for device in devices) or 0.0
            for name in sorted(optimisers)
        },
    }


def _handling(links: Sequence[LinkProfile]) -> dict[str, float]:
    """What messages take of processors of one kind; wires may differ."""
    names = ("cpu_s_per_byte", "message_s", "summed_cpu_s_per_byte")
    return {name: median(getattr(link, name) for link in links) for name in names}


def _own(found: Sequence[Own]) -> Own:
    steps_s = {
        kind: (
            median(one.steps_s.get(kind, (0.0, 0.0))[0] for one in found),
            median(one.steps_s.get(kind, (0.0, 0.0))[1] for one in found),
        )
        for kind in dict.fromkeys(kind for one in found for kind in one.steps_s)
    }
    return Own(steps_s, median(o.net_s for o in found), median(o.weight_s for o in found))


def _timings(devices: Sequence[DeviceProfile]) -> dict[Load, Timing]:
    found: dict[Load, list[Timing]] = {}
    for device in devices:
        for timing in device.timings:
            found.setdefault(timing.load, []).append(timing)
    return {
        load: Timing(
            load,
            median(timing.forward_s for timing in timings),
            _median(timing.backward_input_s for timing in timings),
            _median(timing.backward_weight_s for timing in timings),
        )
        for load, timings in found.items()
    }


def _directions(timing: Timing) -> tuple[float, float, float]:
    """Seconds forward and each way back; 0 where there is no such gradient."""
    return timing.forward_s, timing.backward_input_s or 0.0, timing.backward_weight_s or 0.0


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

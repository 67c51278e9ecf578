"""Prices: what computing, copying, sending and summing cost on the devices of a profile.

A message costs processor time on both sides (packing, the kernel's network code, waking up) and
time on the wire. Processor time is measured in seconds of a core; a device under a quota, or with
slow cores, takes longer for it by the factor that its profile states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import median

from terrazzo.geometry import Box
from terrazzo.graph.rules import Local
from terrazzo.planner.alike import levelled, speed
from terrazzo.planner.rates import Rates, Seconds
from terrazzo.planner.workload import of_local, of_node
from terrazzo.records import Graph, Node
from terrazzo.records.profile import DeviceProfile, Network, Profile
from terrazzo.schedule import Arrive, Combine, Compute, Exchange, Passes, Spread, Step, Take
from terrazzo.schedule.sums import SMALL_BYTES

STEP_CALLS = {Compute: 15, Passes: 20, Combine: 40, Exchange: 55, Arrive: 10} | {
    Spread: 5,
    Take: 5,
}
"""The runtime's own part of a step, one direction, in small calls of torch: what those cost is
measured on every device. Fitted to whole steps of small networks (docs/log.md)."""
APPLY_CALLS = 3
"""The same for an operator, beyond the call itself."""
NET_CALLS = 400
"""And for a training step as a whole: looking at the model, notes, the gradients' way to it."""
ALIKE = 0.1
"""Devices whose speeds differ by less count as equal when shares are given out."""
NOTE_BYTES = 128
"""A note by which devices agree, before and after a backward pass and before a forward pass."""
STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors as large as the weights that an optimiser keeps."""

NOTHING = Seconds(0.0, 0.0, 0.0)


class Prices:
    """Costs on all devices; ``classes`` takes devices that are nearly alike as equal.

    ``delivered`` is what an element of the input takes on its way from the device that reads: 1 for
    pictures as uint8, 0 where every device has its input already.
    """

    def __init__(self, profile: Profile, *, classes: bool = False, delivered: int = 0) -> None:
        self.profile, self.delivered = profile, delivered
        profile = levelled(profile)
        self.devices = len(profile.devices)
        self.names = tuple(device.name for device in profile.devices)
        self.rates = _rates(profile.devices, classes=classes)
        self._small_s = tuple(sum(rates.call_s) / 2 for rates in self.rates)
        self.slowness = tuple(device.seconds_per_cpu_s for device in profile.devices)
        self.network = profile.network if self.devices > 1 else None
        self.shared = self.network is not None and self.network.shared

    # ---- computing -----------------------------------------------------------------------

    def step_s(self, kind: type[Step], device: int) -> float:
        return STEP_CALLS[kind] * self._small_s[device]

    def apply_s(self, device: int) -> float:
        return APPLY_CALLS * self._small_s[device]

    def net_s(self, device: int) -> float:
        return NET_CALLS * self._small_s[device]

    def local(self, local: Local, box: Box, device: int) -> Seconds:
        """One box of an operator."""
        load = of_local(local, box)
        return self._call(device) if load is None else self.rates[device].seconds(load)

    def whole(self, node: Node, graph: Graph, device: int) -> Seconds:
        """All of an operator, as every device computes it."""
        load = of_node(node, graph)
        return self._call(device) if load is None else self.rates[device].seconds(load)

    def _call(self, device: int) -> Seconds:
        forward_s, backward_s = self.rates[device].call_s
        return Seconds(forward_s, backward_s, 0.0)

    def copy_s(self, count_bytes: float, device: int) -> float:
        return self.rates[device].copy_s(count_bytes)

    # ---- links ---------------------------------------------------------------------------

    @property
    def _net(self) -> Network:
        assert self.network is not None, "a device alone sends nothing"
        return self.network

    def up(self, device: int) -> float:
        return self._net.links[device].up_bytes_per_s

    def down(self, device: int) -> float:
        return self._net.links[device].down_bytes_per_s

    def latency_s(self, device: int) -> float:
        """Until a small message is there that a device computing something else waits for."""
        return self._net.links[device].latency_s + self._net.meeting_s

    def message_s(self, device: int) -> float:
        """Processor time of one message on one side, however small."""
        return self._net.links[device].message_s * self.slowness[device]

    def byte_s(self, device: int) -> float:
        """Processor time of a byte sent or received."""
        return self._net.links[device].cpu_s_per_byte * self.slowness[device]

    @property
    def medium(self) -> float:
        """Bytes a second of one medium that all share."""
        return self._net.together_bytes_per_s

    def gather_s(self, payload_bytes: float) -> float:
        """A small tensor from each device to all others, in one round."""
        if self.network is None:
            return 0.0
        if self.network.gathers_s:
            return _between(self.network.gathers_s, payload_bytes) + self.network.meeting_s
        others = self.devices - 1
        worst = max(
            self.latency_s(d) + 2 * others * self.message_s(d) + others * payload_bytes / self.up(d)
            for d in range(self.devices)
        )
        air_s = self.devices * others * payload_bytes / self.medium if self.shared else 0.0
        return max(worst, air_s)

    def sum_s(self, payload_bytes: float, members: int = 0) -> float:
        """A sum over a circle of devices (0: all): two rounds, in each an n-th to all others."""
        members = members or self.devices
        if self.network is None or members < 2:
            return 0.0
        pieces, all_pieces = 2 * (members - 1), 2 * (self.devices - 1)
        if self.network.sums_s:
            points = self.network.sums_s
            start_s = points[0][1]
            moved_s = max(0.0, _between(points, payload_bytes) - start_s)
            part = (pieces / members) / (all_pieces / self.devices)
            return start_s + moved_s * part
        rate = min(min(self.up(d), self.down(d)) for d in range(self.devices))
        if self.shared:
            rate = self.medium / members
        late_s = max(self.latency_s(d) + pieces * self.message_s(d) for d in range(self.devices))
        return 2 * late_s + pieces * payload_bytes / members / rate

    def sum_cpu_s(self, payload_bytes: float, device: int, members: int = 0) -> float:
        """What a sum in the background takes from the processor of one device."""
        members = members or self.devices
        pieces = 2 * (members - 1)
        sent = payload_bytes * pieces / members
        return 2 * pieces * self.message_s(device) + 2 * sent * self.byte_s(device)

    def joint_s(self, payload_bytes: float) -> float:
        """A sum that everybody waits for."""
        small = payload_bytes <= SMALL_BYTES
        return self.gather_s(payload_bytes) if small else self.sum_s(payload_bytes)


def _rates(devices: Sequence[DeviceProfile], *, classes: bool) -> tuple[Rates, ...]:
    """Rates of each device; devices with the same figures share them, or those of a class."""
    speeds = [speed(device) for device in devices]
    made: dict[int, Rates] = {}
    found = []
    for index, device in enumerate(devices):
        for other in made:
            same = devices[other].timings == device.timings
            if same or (classes and abs(speeds[other] / (speeds[index] or 1.0) - 1) <= ALIKE):
                made[index] = made[other]
                break
        else:
            made[index] = Rates(device)
        found.append(made[index])
    return tuple(found)


def speeds(profile: Profile) -> tuple[float, ...]:
    """Of all devices, those that are nearly alike made equal."""
    found = [speed(device) or 1.0 for device in levelled(profile).devices]
    middle = median(found)
    if all(abs(value / middle - 1) <= ALIKE for value in found):
        return (middle,) * len(found)
    return tuple(found)


def _between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Straight lines between measured points and beyond the last; flat before the first."""
    return _interpolated(tuple(sorted(points)), size)


@lru_cache(maxsize=1 << 12)
def _interpolated(points: tuple[tuple[int, float], ...], size: float) -> float:
    if size <= points[0][0]:
        return points[0][1]
    pairs = list(pairwise(points))
    if not pairs:
        return points[0][1] * size / points[0][0]
    low, high = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    slope = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
    return low[1] + slope * (size - low[0])

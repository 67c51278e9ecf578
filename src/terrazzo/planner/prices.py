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
from terrazzo.schedule.sums import HUB_FROM, SMALL_BYTES, small_sum_messages
from terrazzo.schedule.training import EVERYTHING, Training

ALIKE = 0.1
"""Devices whose speeds differ by less count as equal when shares are given out."""
NOTE_BYTES = 128
"""A note by which devices agree, before and after a backward pass and before a forward pass."""

NOTHING = Seconds(0.0, 0.0, 0.0)


class Prices:
    """Costs on all devices; ``classes`` takes devices that are nearly alike as equal.

    ``delivered`` is what an element of the input takes on its way from the device that reads: 1 for
    pictures as uint8, 0 where every device has its input already. ``training`` is what a step
    trains.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        classes: bool = False,
        delivered: int = 0,
        training: Training = EVERYTHING,
    ) -> None:
        self.profile, self.delivered, self.training = profile, delivered, training
        profile = levelled(profile)
        self.devices = len(profile.devices)
        self.names = tuple(device.name for device in profile.devices)
        self.rates = _rates(profile.devices, classes=classes)
        self._own = tuple(device.own for device in profile.devices)
        self.saved_s = tuple(device.saved_s for device in profile.devices)
        self.slowness = tuple(device.seconds_per_cpu_s for device in profile.devices)
        self.network = profile.network if self.devices > 1 else None
        self.shared = self.network is not None and self.network.shared

    # ---- computing -----------------------------------------------------------------------

    def own_s(self, kind: str, device: int) -> tuple[float, float]:
        """The runtime's own part of a kind of step, or of an operator, there and back."""
        return self._own[device].steps_s.get(kind, (0.0, 0.0))

    def net_s(self, weights: int, device: int) -> float:
        """And of a training step as a whole, for a model of so many weights."""
        own = self._own[device]
        return own.net_s + weights * own.weight_s

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

    def fresh_s(self, count_bytes: float, device: int) -> float:
        return self.rates[device].fresh_s(count_bytes)

    def update_s(self, elements: float, device: int) -> float:
        """The optimiser's step over so many weights."""
        return self.rates[device].update_s(elements, self.training.optimizer)

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
        """Until a small message is there."""
        return self._net.links[device].latency_s

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

    def notes_s(self, payload_bytes: float) -> float:
        """A little from everybody to everybody: how long it is on its way."""
        others = self.devices - 1
        return self._round_s(payload_bytes, messages=self.devices * others)

    def small_s(self, payload_bytes: float) -> float:
        """A small sum. Of many devices one makes it for all: it goes there, and back."""
        if self.devices < HUB_FROM:
            return self.notes_s(payload_bytes)
        return 2 * self._round_s(payload_bytes, messages=self.devices - 1)

    def _round_s(self, payload_bytes: float, *, messages: int) -> float:
        """Until the device that gets or sends most of so many messages is done."""
        if self.network is None:
            return 0.0
        most_bytes = (self.devices - 1) * payload_bytes
        worst = max(
            self.latency_s(d) + most_bytes / min(self.up(d), self.down(d))
            for d in range(self.devices)
        )
        return max(worst, messages * payload_bytes / self.medium if self.shared else 0.0)

    def small_cpu_s(self, payload_bytes: float, device: int) -> float:
        """What that takes of a device's processor."""
        if self.network is None:
            return 0.0
        each_s = self.message_s(device) + payload_bytes * self.byte_s(device)
        return small_sum_messages(self.devices) * each_s

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
        byte_s = self._net.links[device].summed_cpu_s_per_byte * self.slowness[device]
        return 2 * pieces * self.message_s(device) + 2 * sent * byte_s

    def joint_s(self, payload_bytes: float) -> float:
        """A sum that everybody waits for: how long it is on its way."""
        small = payload_bytes <= SMALL_BYTES
        return self.small_s(payload_bytes) if small else self.sum_s(payload_bytes)

    def joint_cpu_s(self, payload_bytes: float, device: int) -> float:
        """And what it takes of a device's processor."""
        if self.network is None:
            return 0.0
        small = payload_bytes <= SMALL_BYTES
        cost = self.small_cpu_s if small else self.sum_cpu_s
        return cost(payload_bytes, device)


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

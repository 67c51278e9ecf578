"""Links: what the ways between devices carry, measured through torch.distributed as training is.

Every measurement is made by all devices at the same moment. Devices sit in a ring: each sends to
both neighbours and receives from both at once, which is the worst a halo exchange does. One pair
alone, in one direction, tells whether the others had to share: by cable each has its own way to the
switch, on the air all wait for each other.

What is sent lies where a device's net lies. On a GPU it passes through pinned memory of the host on
its way out and in (``runtime/staging.py``), one after the other: that is a part of every figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.measure.accelerator import CPU, settle
from terrazzo.records.profile import LinkProfile, Network
from terrazzo.runtime.links import Links
from terrazzo.runtime.staging import room
from terrazzo.runtime.wire import Parcel

SMALL_BYTES = 64
FIRST_BYTES, LEAST_BYTES, MOST_BYTES = 1 << 18, 1 << 18, 16 << 20
LONG_S = 0.6
"""How long a flow is measured: many turns of a quota, many buckets of a shaper."""
FIRST_PART = 4
"""Before a flow is measured, so small a part of it goes ahead: a device that begins late would find
that much of it there already, and its link faster than it is."""
PINGS, MESSAGES = 11, 60
PAUSE_S = 0.025
BOX_BYTES, BOXES, PRODUCTS = 1 << 16, 16, 50
"""A box as large as many are, how many of them go each way, and products made while they do."""
SUMMED_BYTES = (1 << 12, 1 << 20, 8 << 20)
LONGEST_SUM_S = 5.0
SHARED_BELOW = 0.65
"""All at once get less than this part of what pairs alone would: they share something."""


def measure_network(
    links: Links, say: Callable[[str], None], torch_device: torch.device = CPU
) -> Network:
    """All devices call it at once; all get the same."""
    ends = _Ends(links, torch_device)
    say("links: latency")
    latency_s = _latency_s(ends)
    message_s = measure_message_s(links, torch_device)
    say("links: one pair alone")
    alone = _alone(ends)
    say("links: all at once")
    up, down = _together(ends, alone)
    cpu_s_per_byte = _handled_s_per_byte(ends, message_s)
    say("links: sums")
    sums = _sums_s(ends)
    say("links: sums beside computing")
    own = [up, down, latency_s, cpu_s_per_byte, message_s, _beside_cpu_s_per_byte(ends, sums)]
    rows = links.gather(torch.tensor(own, dtype=torch.float64), counted=False).tolist()
    found = tuple(LinkProfile(*row) for row in rows)
    together = sum(link.up_bytes_per_s for link in found)
    return Network(
        links=found,
        shared=_is_shared(links.devices, alone, together),
        alone_bytes_per_s=alone,
        together_bytes_per_s=together,
        sums_s=tuple(sums),
    )


def _is_shared(devices: int, alone: float, together: float) -> bool:
    """Two devices that send at once also show it: a cable carries both directions."""
    return devices > 1 and together < SHARED_BELOW * alone * devices


@dataclass(frozen=True, slots=True)
class _Ends:
    """The links of this device, and where what it sends and receives lies."""

    links: Links
    torch_device: torch.device

    def zeros(self, count_bytes: int) -> Tensor:
        return torch.zeros(count_bytes // 4, device=self.torch_device)

    def ready(self, *tensors: Tensor) -> None:
        """Pins memory for all of them, which torch keeps: a step finds it there."""
        _ = [room(tensor) for tensor in tensors]

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Until what arrived is where it belongs."""
        self.links.exchange(sends, receives)
        settle(self.torch_device)


def _latency_s(ends: _Ends) -> float:
    """Half a round trip with the next device, one pair after the other, the rest idle."""
    links, own = ends.links, list[float]()
    for first in range(links.devices):
        second = (first + 1) % links.devices
        _meet(links)
        if links.device in (first, second):
            trips = [_ping(ends, first, second) for _ in range(PINGS)]
            own = trips if links.device == first else own
    return statistics.median(own) / 2


def _ping(ends: _Ends, first: int, second: int) -> float:
    """Seconds there and back, after a pause in which a device gets its next turn."""
    out, back = ends.zeros(SMALL_BYTES), ends.zeros(SMALL_BYTES)
    begins = ends.links.device == first
    if begins:
        time.sleep(PAUSE_S)
    begin_s = time.perf_counter()
    if begins:
        ends.exchange([(second, out)], [])
        ends.exchange([], [(second, back)])
    else:
        ends.exchange([], [(first, back)])
        ends.exchange([(first, out)], [])
    return time.perf_counter() - begin_s


def measure_message_s(links: Links, torch_device: torch.device = CPU) -> float:
    """Processor time of a message however small, sent or received; 0 for a device alone."""
    if links.devices == 1:
        return 0.0
    after, before = _neighbours(links)
    ends = _Ends(links, torch_device)
    _meet(links)
    begin_s = time.process_time()
    for _ in range(MESSAGES):
        links.exchange([(after, ends.zeros(16))], [(before, ends.zeros(16))])
    return (time.process_time() - begin_s) / (2 * MESSAGES)


def _alone(ends: _Ends) -> float:
    """Bytes a second from the first device to the second; the same number on all."""
    links, rate, size = ends.links, 0.0, FIRST_BYTES
    for attempt in range(2):
        _meet(links)
        buffer = ends.zeros(size)
        ends.ready(buffer)
        _pass_on(ends, buffer[: size // 4 // FIRST_PART])
        begin_s = time.perf_counter()
        _pass_on(ends, buffer)
        elapsed_s = time.perf_counter() - begin_s
        seen = links.gather(torch.tensor([elapsed_s], dtype=torch.float64), counted=False)
        rate = size / float(seen[1, 0])  # when it has arrived
        size = _enough(rate) if attempt == 0 else size
    return rate


def _pass_on(ends: _Ends, buffer: Tensor) -> None:
    """From the first device to the second."""
    if ends.links.device == 0:
        ends.exchange([(1, buffer)], [])
    elif ends.links.device == 1:
        ends.exchange([], [(0, buffer)])


def _together(ends: _Ends, alone: float) -> tuple[float, float]:
    """Up and down rate of this device with all busy both ways."""
    links, size = ends.links, _enough(alone / 2)
    after, before = _neighbours(links)
    both = (after, before) if links.devices > 2 else (after,)
    sends = [(peer, ends.zeros(size)) for peer in both]
    receives = [(peer, ends.zeros(size)) for peer in both]
    ends.ready(*(tensor for _, tensor in (*sends, *receives)))
    _meet(links)
    early = size // 4 // FIRST_PART
    ends.exchange([(p, t[:early]) for p, t in sends], [(p, t[:early]) for p, t in receives])
    begin_s = time.perf_counter()
    ends.exchange(sends, receives)
    elapsed_s = time.perf_counter() - begin_s
    moved = sum(tensor.numel() * 4 for _, tensor in sends)
    return moved / elapsed_s, moved / elapsed_s


def _handled_s_per_byte(ends: _Ends, message_s: float) -> float:
    """Processor time for a byte sent or received, of boxes that travel while a device computes."""
    links, both = ends.links, set(_neighbours(ends.links))
    sends = [(peer, ends.zeros(BOX_BYTES)) for peer in both]
    receives = [(peer, ends.zeros(BOX_BYTES)) for peer in both]
    ends.ready(*(tensor for _, tensor in (*sends, *receives)))
    left, right, worked_s = torch.zeros(64, 64), torch.zeros(64, 64), 0.0

    def work() -> None:
        nonlocal worked_s
        begin_s = time.thread_time()
        for _ in range(PRODUCTS):
            left @ right
        worked_s += time.thread_time() - begin_s

    _meet(links)
    begin_s = time.process_time()
    for _ in range(BOXES):
        links.exchange(sends, receives, meanwhile=work)
    handled_s = time.process_time() - begin_s - worked_s - 2 * BOXES * len(both) * message_s
    return max(0.0, handled_s) / (2 * BOXES * len(both) * BOX_BYTES)


def _enough(rate: float) -> int:
    size = int(min(MOST_BYTES, max(LEAST_BYTES, rate * LONG_S)))
    return size // 4096 * 4096


def _sums_s(ends: _Ends) -> list[tuple[int, float]]:
    """By size, from the smallest on, as long as the next would not take too long."""
    found: list[tuple[int, float]] = []
    for size in SUMMED_BYTES:
        if found and found[-1][1] * size / found[-1][0] > LONGEST_SUM_S and len(found) > 1:
            break  # all devices break here: they hold the same figures
        found.append((size, _sum_s(ends, size)))
    return found


def _sum_s(ends: _Ends, size: int) -> float:
    """Seconds until the last device has it; small ones are repeated."""
    links, tensor = ends.links, ends.zeros(size)
    ends.ready(tensor)
    repeats = 1 if size > 1 << 18 else 8
    links.sum_later(ends.zeros(16)).wait()
    _meet(links)
    begin_s = time.perf_counter()
    for _ in range(repeats):
        links.sum_later(tensor).wait()
        settle(ends.torch_device)
    elapsed_s = (time.perf_counter() - begin_s) / repeats
    seen = links.gather(torch.tensor([elapsed_s], dtype=torch.float64), counted=False)
    return float(seen.max())


def _beside_cpu_s_per_byte(ends: _Ends, sums: Sequence[tuple[int, float]]) -> float:
    """Processor time of other threads for a byte of a sum that is made while this one computes."""
    links, (size, alone_s) = ends.links, sums[-1]
    tensor, left, right = ends.zeros(size), torch.zeros(64, 64), torch.zeros(64, 64)
    _meet(links)
    begin_s = (time.process_time(), time.thread_time())
    under_way, until_s = links.sum_later(tensor), time.perf_counter() + alone_s
    while time.perf_counter() < until_s:
        left @ right
    under_way.wait()
    all_s, own_s = time.process_time() - begin_s[0], time.thread_time() - begin_s[1]
    sent = 2 * size * (links.devices - 1) / links.devices
    return max(0.0, all_s - own_s) / (2 * sent)


def _neighbours(links: Links) -> tuple[int, int]:
    return (links.device + 1) % links.devices, (links.device - 1) % links.devices


def _meet(links: Links) -> None:
    """All devices leave it at nearly the same moment."""
    links.gather(torch.zeros(1), counted=False)

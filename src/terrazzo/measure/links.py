"""Links: what the ways between devices carry, measured through torch.distributed as training is.

Every measurement is made by all devices at the same moment. Devices sit in a ring: each sends to
both neighbours and receives from both at once, which is the worst a halo exchange does. One pair
alone, in one direction, tells whether the others had to share: by cable each has its own way to the
switch, on the air all wait for each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.records.profile import LinkProfile, Network
from terrazzo.runtime.links import Links

SMALL_BYTES = 64
FIRST_BYTES, LEAST_BYTES, MOST_BYTES = 1 << 18, 1 << 18, 16 << 20
LONG_S = 0.6
"""How long a flow is measured: many turns of a quota, many buckets of a shaper."""
FIRST_PART = 4
"""Before a flow is measured, so small a part of it goes ahead: a device that begins late would find
that much of it there already, and its link faster than it is."""
PINGS, MESSAGES = 11, 60
PAUSE_S = 0.025
SUMMED_BYTES, GATHERED_BYTES = (1 << 12, 1 << 20, 8 << 20), (1 << 10, 1 << 16)
LONGEST_SUM_S = 5.0
TURNS, MEETINGS, BETWEEN_S = 5, 8, 0.04
"""How often it is tried with and without meetings, how many meetings there are each time, and about
how long all compute before each."""
SHARED_BELOW = 0.65
"""All at once get less than this part of what pairs alone would: they share something."""


def measure_network(links: Links, say: Callable[[str], None]) -> Network:
    """All devices call it at once; all get the same."""
    say("links: latency")
    latency_s = _latency_s(links)
    message_s = _message_s(links)
    say("links: one pair alone")
    alone = _alone(links)
    say("links: all at once")
    up, down, cpu_s_per_byte = _together(links, alone)
    say("links: sums and gathers")
    sums = _collectives_s(links, SUMMED_BYTES, _sum)
    gathers = _collectives_s(links, GATHERED_BYTES, _gather)
    say("links: meeting in the middle of work")
    meeting_s = _meeting_s(links, gathers[0])
    own = [up, down, latency_s, cpu_s_per_byte, message_s]
    rows = links.gather(torch.tensor(own, dtype=torch.float64), counted=False).tolist()
    found = tuple(LinkProfile(*row) for row in rows)
    together = sum(link.up_bytes_per_s for link in found)
    return Network(
        links=found,
        shared=_is_shared(links.devices, alone, together),
        alone_bytes_per_s=alone,
        together_bytes_per_s=together,
        sums_s=tuple(sums),
        gathers_s=tuple(gathers),
        meeting_s=meeting_s,
    )


def _is_shared(devices: int, alone: float, together: float) -> bool:
    """Two devices that send at once also show it: a cable carries both directions."""
    return devices > 1 and together < SHARED_BELOW * alone * devices


def _latency_s(links: Links) -> float:
    """Half a round trip with the next device, one pair after the other, the rest idle."""
    own: list[float] = []
    for first in range(links.devices):
        second = (first + 1) % links.devices
        _meet(links)
        if links.device in (first, second):
            trips = [_ping(links, first, second) for _ in range(PINGS)]
            own = trips if links.device == first else own
    return statistics.median(own) / 2


def _ping(links: Links, first: int, second: int) -> float:
    """Seconds there and back, after a pause in which a device gets its next turn."""
    out, back = torch.zeros(SMALL_BYTES // 4), torch.zeros(SMALL_BYTES // 4)
    if links.device == first:
        time.sleep(PAUSE_S)
    begin_s = time.perf_counter()
    if links.device == first:
        links.exchange([(second, out)], [])
        links.exchange([], [(second, back)])
    else:
        links.exchange([], [(first, back)])
        links.exchange([(first, out)], [])
    return time.perf_counter() - begin_s


def _message_s(links: Links) -> float:
    """Processor time of a message however small, sent or received."""
    after, before = _neighbours(links)
    _meet(links)
    begin_s = time.process_time()
    for _ in range(MESSAGES):
        links.exchange([(after, torch.zeros(4))], [(before, torch.zeros(4))])
    return (time.process_time() - begin_s) / (2 * MESSAGES)


def _alone(links: Links) -> float:
    """Bytes a second from the first device to the second; the same number on all."""
    rate, size = 0.0, FIRST_BYTES
    for attempt in range(2):
        _meet(links)
        buffer = torch.zeros(size // 4)
        _pass_on(links, buffer[: size // 4 // FIRST_PART])
        begin_s = time.perf_counter()
        _pass_on(links, buffer)
        elapsed_s = time.perf_counter() - begin_s
        seen = links.gather(torch.tensor([elapsed_s], dtype=torch.float64), counted=False)
        rate = size / float(seen[1, 0])  # when it has arrived
        size = _enough(rate) if attempt == 0 else size
    return rate


def _pass_on(links: Links, buffer: Tensor) -> None:
    """From the first device to the second."""
    if links.device == 0:
        links.exchange([(1, buffer)], [])
    elif links.device == 1:
        links.exchange([], [(0, buffer)])


def _together(links: Links, alone: float) -> tuple[float, float, float]:
    """Up and down rate of this device with all busy both ways, and processor time for a byte."""
    after, before = _neighbours(links)
    size = _enough(alone / 2)
    numbers = size // 4
    both = (after, before) if links.devices > 2 else (after,)
    sends = [(peer, torch.zeros(numbers)) for peer in both]
    receives = [(peer, torch.zeros(numbers)) for peer in both]
    _meet(links)
    early = numbers // FIRST_PART
    links.exchange([(p, t[:early]) for p, t in sends], [(p, t[:early]) for p, t in receives])
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    links.exchange(sends, receives)
    elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    moved = sum(tensor.numel() * 4 for _, tensor in sends)
    return moved / elapsed_s, moved / elapsed_s, cpu_s / (2 * moved)


def _enough(rate: float) -> int:
    size = int(min(MOST_BYTES, max(LEAST_BYTES, rate * LONG_S)))
    return size // 4096 * 4096


def _collectives_s(
    links: Links, sizes: Sequence[int], collective: Callable[[Links, Tensor], Any]
) -> list[tuple[int, float]]:
    """By size, from the smallest on, as long as the next would not take too long."""
    found: list[tuple[int, float]] = []
    for size in sizes:
        if found and found[-1][1] * size / found[-1][0] > LONGEST_SUM_S and len(found) > 1:
            break  # all devices break here: they hold the same figures
        found.append((size, _collective_s(links, size, collective)))
    return found


def _collective_s(links: Links, size: int, collective: Callable[[Links, Tensor], Any]) -> float:
    """Seconds until the last device has it; small ones are repeated."""
    tensor = torch.zeros(size // 4)
    repeats = 1 if size > 1 << 18 else 8
    collective(links, torch.zeros(4))
    _meet(links)
    begin_s = time.perf_counter()
    for _ in range(repeats):
        collective(links, tensor)
    elapsed_s = (time.perf_counter() - begin_s) / repeats
    seen = links.gather(torch.tensor([elapsed_s], dtype=torch.float64), counted=False)
    return float(seen.max())


def _meeting_s(links: Links, gather: tuple[int, float]) -> float:
    """What a gather takes longer when it interrupts computing than when all wait for it.

    Devices with equal work are not there at the same moment: a quota, another process or the
    network's interrupts hold one up, then another. Computing the same without meeting is
    subtracted, in turns, since a device is not equally fast for long. All devices get the same
    figure.
    """
    size, gather_s = gather
    left, right, tensor = torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(size // 4)
    repeats = _repeats(links, lambda: left @ right)

    def seconds(meets: bool) -> float:
        _meet(links)
        begin_s = time.perf_counter()
        for _ in range(MEETINGS):
            for _ in range(repeats):
                left @ right
            if meets:
                _gather(links, tensor)
        took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
        return float(links.gather(took, counted=False).max())

    longer = statistics.median(-seconds(False) + seconds(True) for _ in range(TURNS))
    return max(0.0, longer / MEETINGS - gather_s)


def _repeats(links: Links, work: Callable[[], Any]) -> int:
    """So many repeats of a work take this device about ``BETWEEN_S``."""
    _meet(links)
    begin_s, count = time.perf_counter(), 0
    while time.perf_counter() - begin_s < 5 * BETWEEN_S:
        work()
        count += 1
    return max(1, count // 5)


def _sum(links: Links, tensor: Tensor) -> Any:
    return links.sum_later(tensor).wait()


def _gather(links: Links, tensor: Tensor) -> Any:
    return links.gather(tensor)


def _neighbours(links: Links) -> tuple[int, int]:
    return (links.device + 1) % links.devices, (links.device - 1) % links.devices


def _meet(links: Links) -> None:
    """All devices leave it at nearly the same moment."""
    links.gather(torch.zeros(1), counted=False)

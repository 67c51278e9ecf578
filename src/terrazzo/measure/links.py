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
BOX_BYTES, BOXES, PRODUCTS = 1 << 16, 16, 50
"""A box as large as many are, how many of them go each way, and products made while they do."""
SUMMED_BYTES = (1 << 12, 1 << 20, 8 << 20)
LONGEST_SUM_S = 5.0
SHARED_BELOW = 0.65
"""All at once get less than this part of what pairs alone would: they share something."""


def measure_network(links: Links, say: Callable[[str], None]) -> Network:
    """All devices call it at once; all get the same."""
    say("links: latency")
    latency_s = _latency_s(links)
    message_s = measure_message_s(links)
    say("links: one pair alone")
    alone = _alone(links)
    say("links: all at once")
    up, down = _together(links, alone)
    cpu_s_per_byte = _handled_s_per_byte(links, message_s)
    say("links: sums")
    sums = _sums_s(links)
    say("links: sums beside computing")
    own = [up, down, latency_s, cpu_s_per_byte, message_s, _beside_cpu_s_per_byte(links, sums)]
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


def measure_message_s(links: Links) -> float:
    """Processor time of a message however small, sent or received; 0 for a device alone."""
    if links.devices == 1:
        return 0.0
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


def _together(links: Links, alone: float) -> tuple[float, float]:
    """Up and down rate of this device with all busy both ways."""
    after, before = _neighbours(links)
    size = _enough(alone / 2)
    numbers = size // 4
    both = (after, before) if links.devices > 2 else (after,)
    sends = [(peer, torch.zeros(numbers)) for peer in both]
    receives = [(peer, torch.zeros(numbers)) for peer in both]
    _meet(links)
    early = numbers // FIRST_PART
    links.exchange([(p, t[:early]) for p, t in sends], [(p, t[:early]) for p, t in receives])
    begin_s = time.perf_counter()
    links.exchange(sends, receives)
    elapsed_s = time.perf_counter() - begin_s
    moved = sum(tensor.numel() * 4 for _, tensor in sends)
    return moved / elapsed_s, moved / elapsed_s


def _handled_s_per_byte(links: Links, message_s: float) -> float:
    """Processor time for a byte sent or received, of boxes that travel while a device computes."""
    both = set(_neighbours(links))
    sends = [(peer, torch.zeros(BOX_BYTES // 4)) for peer in both]
    receives = [(peer, torch.zeros(BOX_BYTES // 4)) for peer in both]
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


def _sums_s(links: Links) -> list[tuple[int, float]]:
    """By size, from the smallest on, as long as the next would not take too long."""
    found: list[tuple[int, float]] = []
    for size in SUMMED_BYTES:
        if found and found[-1][1] * size / found[-1][0] > LONGEST_SUM_S and len(found) > 1:
            break  # all devices break here: they hold the same figures
        found.append((size, _sum_s(links, size)))
    return found


def _sum_s(links: Links, size: int) -> float:
    """Seconds until the last device has it; small ones are repeated."""
    tensor = torch.zeros(size // 4)
    repeats = 1 if size > 1 << 18 else 8
    links.sum_later(torch.zeros(4)).wait()
    _meet(links)
    begin_s = time.perf_counter()
    for _ in range(repeats):
        links.sum_later(tensor).wait()
    elapsed_s = (time.perf_counter() - begin_s) / repeats
    seen = links.gather(torch.tensor([elapsed_s], dtype=torch.float64), counted=False)
    return float(seen.max())


def _beside_cpu_s_per_byte(links: Links, sums: Sequence[tuple[int, float]]) -> float:
    """Processor time of other threads for a byte of a sum that is made while this one computes."""
    size, alone_s = sums[-1]
    tensor, left, right = torch.zeros(size // 4), torch.zeros(64, 64), torch.zeros(64, 64)
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

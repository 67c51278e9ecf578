"""Kin: devices of one make and speed share the measuring; what one of them times counts for all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from terrazzo.measure.accelerator import CPU, settle, title
from terrazzo.measure.key import power_state
from terrazzo.records.machine import Machine
from terrazzo.runtime.links import Links

SIDE, GPU_SIDE = 64, 1024
LOOK_S = 0.25
"""How long a device computes to see how fast it is: over several turns of a quota."""
APART = 1.4
"""So many times as fast is another speed. A short look is off by less."""


@dataclass(frozen=True, slots=True)
class Share:
    """This device's place among its kin, and how many they are."""

    place: int
    of: int

    def order(self, count: int, common: Sequence[int]) -> list[int]:
        """Of so many trials, which comes when: first the ``common`` ones, which everybody times, so
        that devices can be compared; then the own share of the rest, then that of the next."""
        rest = [place for place in range(count) if place not in common]
        turns = sorted(range(len(rest)), key=lambda n: ((n - self.place) % self.of, n))
        return [*common, *(rest[n] for n in turns)]


ALONE = Share(0, 1)


def kin(links: Links, torch_device: torch.device = CPU) -> Share:
    """All devices call it at once."""
    machine, accelerator = asdict(Machine.here()), title(torch_device)
    make = [machine, torch.get_num_threads(), power_state(), accelerator]
    own = json.dumps([make, look(torch_device)])
    told = [json.loads(text) for text in links.gather_text(own)]
    own_make, own_rate = told[links.device]
    alike = [
        device
        for device, (make, rate) in enumerate(told)
        if make == own_make and max(rate, own_rate) < APART * min(rate, own_rate)
    ]
    return Share(alike.index(links.device), len(alike))


def look(torch_device: torch.device = CPU) -> float:
    """Small products in a second."""
    side = SIDE if torch_device.type == CPU.type else GPU_SIDE
    left, right = (torch.zeros(side, side, device=torch_device) for _ in range(2))
    begin_s, count = time.perf_counter(), 0
    while time.perf_counter() - begin_s < LOOK_S:
        left @ right
        settle(torch_device)
        count += 1
    return count / (time.perf_counter() - begin_s)

"""Kin: devices of one make and speed share the measuring; what one of them times counts for all."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import torch

from terrazzo.measure.key import power_state
from terrazzo.records.machine import Machine
from terrazzo.runtime.links import Links

LOOK_S = 0.25
"""How long a device computes to see how fast it is: over several turns of a quota."""
APART = 1.4
"""So many times as fast is another speed. A short look is off by less."""


@dataclass(frozen=True, slots=True)
class Share:
    """This device's place among its kin, and how many they are."""

    place: int
    of: int

    def order(self, count: int, common: int) -> list[int]:
        """Of so many trials, which comes when: the first ones everybody times, by which devices are
        compared; then the own share of the rest, then that of the next in the row."""
        rest = range(common, count)
        return [*range(common), *sorted(rest, key=lambda n: ((n - self.place) % self.of, n))]


ALONE = Share(0, 1)


def kin(links: Links) -> Share:
    """All devices call it at once."""
    make = [asdict(Machine.here()), torch.get_num_threads(), power_state()]
    told = [json.loads(text) for text in links.gather_text(json.dumps([make, _look()]))]
    own_make, own_rate = told[links.device]
    alike = [
        device
        for device, (make, rate) in enumerate(told)
        if make == own_make and max(rate, own_rate) < APART * min(rate, own_rate)
    ]
    return Share(alike.index(links.device), len(alike))


def _look() -> float:
    """Small products in a second."""
    left, right = torch.zeros(64, 64), torch.zeros(64, 64)
    begin_s, count = time.perf_counter(), 0
    while time.perf_counter() - begin_s < LOOK_S:
        left @ right
        count += 1
    return count / (time.perf_counter() - begin_s)

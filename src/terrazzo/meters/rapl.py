"""RAPL: energy counters of Intel and AMD processors, which wrap around."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import CPU, MOST_W, MOVES_S, Reading, number, text_of


@dataclass
class Rapl:
    """One domain, counted on from the first reading.

    A counter wraps around after a minute to an hour of hard work: it has to be read more often.
    """

    folder: Path
    domain: str
    range_j: float
    covers: str = CPU
    is_measured: bool = True
    interval_s: float = 0.1
    error: float = 0.05
    moves_s: float = MOVES_S
    window_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _at_s: float = field(default=0.0, repr=False)
    _last_j: float | None = field(default=None, repr=False)
    _total_j: float = field(default=0.0, repr=False)

    @property
    def name(self) -> str:
        return f"RAPL {self.domain}"

    def read(self) -> Reading:
        now_j = number(self.folder / "energy_uj") / 1e6
        if not 0 <= now_j <= self.range_j:
            raise MeterError(
                f"{self.folder / 'energy_uj'} says {now_j:g} J, its range ends at "
                f"{self.range_j:g} J: reading left out"
            )
        if self._last_j is not None:
            gone_j = now_j - self._last_j
            if gone_j < 0:
                gone_j += self.range_j
                if gone_j > MOST_W * max(self.clock() - self._at_s, 1.0):
                    gone_j = 0.0  # it began anew, after a suspend
            self._total_j += gone_j
        self._last_j, self._at_s = now_j, self.clock()
        return Reading(joules=self._total_j)


def probe(root: Path) -> list[Rapl]:
    """All packages, with their memory where that is counted apart; parts of a package are not.

    A platform domain (psys) holds them all and more, but not every board has connected it.
    """
    found: list[Rapl] = []
    for folder in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        for place in (folder, *sorted(folder.glob("intel-rapl:*"))):
            domain = text_of(place / "name")
            outer = place == folder and domain.startswith("package")
            if outer or (place != folder and domain == "dram"):
                title = domain if outer else f"{text_of(folder / 'name')} {domain}"
                meter = Rapl(place, title, number(place / "max_energy_range_uj") / 1e6)
                meter.read()
                if all(meter.name != other.name for other in found):
                    found.append(meter)
    return found

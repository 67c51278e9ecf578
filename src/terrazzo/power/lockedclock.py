"""The clocks of a desktop GPU's cores and memory, locked through NVML.

NVML can lock a clock and let it go, but does not tell whether one is locked. So "as it was" means
here that the driver moves it: a lock that somebody else had set is gone afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from terrazzo.errors import KnobError, MeterError
from terrazzo.meters.nvml import CORE, LIBRARY, MEMORY, Nvml, NvmlGpu
from terrazzo.power.knob import Files

FREE = "free"
TOLERANCE_HZ = 20e6
"""Clocks move in steps of 15 MHz, and a lock may end up one below or above."""
NAMES = {CORE: "gpu_hz", MEMORY: "mem_hz"}


@dataclass
class LockedClock:
    """One clock of a GPU: locked to a value, or free."""

    gpu: NvmlGpu
    kind: str
    values: tuple[float, ...]
    _held_hz: float | None = field(default=None, repr=False)

    @classmethod
    def find(cls, library: str = LIBRARY) -> list[LockedClock]:
        """Memory comes first: what the cores can do depends on it."""
        try:
            gpu = Nvml(library).gpus()[0]
        except (MeterError, IndexError):
            return []
        found = []
        for kind in (MEMORY, CORE):
            try:
                values = gpu.clocks_hz(kind)
                gpu.clock_hz(kind)
            except MeterError:
                continue
            if len(values) > 1:
                found.append(cls(gpu, kind, values))
        return found

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    @property
    def governor(self) -> str:
        return "" if self._held_hz else "the driver"

    def read(self) -> float:
        """Where we hold it; free, the most it may go to."""
        return self._held_hz or self.values[-1]

    def set(self, value: float) -> None:
        self._told(lambda: self.gpu.lock_clock(self.kind, value), f"no {self.name} of {value:g}")
        self._held_hz = value
        seen_hz = self._told(lambda: self.gpu.clock_hz(self.kind), f"{self.name} cannot be read")
        # Below: a GPU with nothing to do, too hot or at its power limit.
        if seen_hz > value + TOLERANCE_HZ:
            raise KnobError(
                f"GPU {self.gpu.index}: {self.name} was told {value / 1e6:.0f} MHz and says "
                f"{seen_hz / 1e6:.0f} MHz: this driver does not lock it; leave this knob alone"
            )

    def state(self) -> Files:
        return [(self._key, FREE if self._held_hz is None else f"{self._held_hz:.0f}")]

    def restore(self, files: Files) -> None:
        saved = dict(files).get(self._key)
        if saved is None:
            return
        if saved != FREE:
            self.set(float(saved))
            return
        self._told(lambda: self.gpu.free_clock(self.kind), f"{self.name} stays locked")
        self._held_hz = None

    @property
    def _key(self) -> str:
        return f"nvml:{self.gpu.index}:{self.name}"

    def _told(self, ask: Callable[[], float | None], problem: str) -> float:
        try:
            return ask() or 0.0
        except MeterError as error:
            raise KnobError(f"GPU {self.gpu.index}: {problem}: {error}") from error

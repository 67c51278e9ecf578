"""The sampler: reads a device's meters beside its work, and knows the joules of any window.

A thread that sleeps, longer where a reading is dear: it takes at most a two-hundredth of a core. It
ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from terrazzo.meters.meter import BOARD, Meter
from terrazzo.meters.window import Account, Energy

KEPT = 4096
"""Samples that wait to be written down; older ones are forgotten, their joules are not."""


MOST_OF_A_CORE = 0.005


@dataclass(frozen=True, slots=True)
class Sample:
    """Joules since the sampler began, and the watts since the sample before."""

    time_s: float
    joules: float
    watts: float


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that never jump: a board without a clock is set right while it runs,
    and that must not count as time in which power was drawn."""
    epoch_s = time.time() - time.perf_counter()
    return lambda: epoch_s + time.perf_counter()


class Sampler:
    """All meters of a device, added up.

    Where so many processes are ``sharing`` a machine, each counts an equal part of what its meters
    measure; an estimate is from the process's own time already.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        *,
        clock: Callable[[], float] | None = None,
        sharing: int = 1,
    ) -> None:
        self.accounts = [Account(meter) for meter in meters]
        self._parts = [1 / sharing if meter.is_measured else 1.0 for meter in meters]
        self.clock = clock or steady_clock()
        self.interval_s = max((meter.interval_s for meter in meters), default=1.0)
        self.peak_w = 0.0
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.sample()

    @property
    def is_measured(self) -> bool:
        return all(account.meter.is_measured for account in self.accounts)

    @property
    def error(self) -> float:
        """How far off the power may be, relatively, whatever is repeated."""
        return max((account.meter.error for account in self.accounts), default=0.0)

    @property
    def window_s(self) -> float:
        """The shortest time of which all meters can tell the power."""
        return max((account.meter.window_s for account in self.accounts), default=0.0)

    @property
    def sees_clocks(self) -> bool:
        """Whether any of it is measured: an estimate from time does not know how fast a clock is
        that time was spent at."""
        return any(account.meter.is_measured for account in self.accounts)

    @property
    def covers(self) -> tuple[str, ...]:
        """The parts of the device that are counted; one that is all of it stands for all."""
        found = dict.fromkeys(account.meter.covers for account in self.accounts)
        return (BOARD,) if BOARD in found else tuple(found)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(account.meter.name for account in self.accounts)

    def sample(self) -> Sample:
        """A reading of all meters, now."""
        with self._reading:  # not the other lock: who drains must not wait for a slow meter
            now_s = self.clock()
            for account in self.accounts:
                account.take(now_s)
            both = list(zip(self.accounts, self._parts, strict=True))
            joules = sum(account.joules * part for account, part in both)
            watts = sum(account.watts * part for account, part in both)
            self.peak_w = max(self.peak_w, watts)
            found = Sample(now_s, joules, watts)
            with self._lock:
                self._samples.append(found)
            return found

    def drain(self) -> list[Sample]:
        """The samples since the last call."""
        with self._lock:
            found = list(self._samples)
            self._samples.clear()
            return found

    # ---- windows -------------------------------------------------------------------------

    def begin(self) -> Sample:
        """The beginning of a window."""
        self.peak_w = 0.0
        return self.sample()

    def end(self, begun: Sample) -> Energy:
        """The joules since then."""
        last = self.sample()
        return Energy(
            seconds=last.time_s - begun.time_s,
            joules=last.joules - begun.joules,
            peak_w=self.peak_w,
            is_measured=self.is_measured,
            sources=self.sources,
            doubts=self.doubts,
        )

    @property
    def doubts(self) -> tuple[str, ...]:
        return tuple(doubt for account in self.accounts for doubt in account.doubts)

    @property
    def doubtful_s(self) -> float:
        """For how long a meter told nothing, or nothing new."""
        return max((a.gap_s + a.frozen_s for a in self.accounts if a.doubts), default=0.0)

    # ---- beside other work ---------------------------------------------------------------

    def start(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, name="power", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        pause_s = self.interval_s
        while not self._stop.wait(pause_s):
            begin_s = time.thread_time()
            self.sample()
            pause_s = self.pause_s(time.thread_time() - begin_s)

    def pause_s(self, reading_s: float) -> float:
        """How long to sleep after a reading that took so much processor time (4 ms by NVML)."""
        return max(self.interval_s, reading_s / MOST_OF_A_CORE)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

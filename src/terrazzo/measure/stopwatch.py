"""The stopwatch: seconds of a call, also where a device computes in short turns.

Under a quota of processor time (an emulated device, a container) a call either fits into a turn or
waits for the next, so the wall time of one short call says nothing. With one thread the processor
time of calls is taken instead, and all of them are stretched by how long the device took for it
over the whole session. With several threads processor time is no measure: wall time is, over calls
repeated long enough to average over turns.

Every turn begins with caches that others have filled meanwhile. That is part of computing in turns,
and lost on a median of short batches: so it is the mean that counts, over several turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CPU_LEAST_S = 3e-3
WALL_LEAST_S = 30e-3
BATCH_S = 1.5e-4
"""Calls are timed in batches at least so long: reading the clock takes a part of a microsecond."""
MOST_BATCHES = 30


class Stopwatch:
    """Gives raw seconds; ``stretch`` is what makes them seconds of the device."""

    def __init__(self, threads: int) -> None:
        self.by_cpu = threads == 1
        self._clock = time.thread_time if self.by_cpu else time.perf_counter
        self._least_s = CPU_LEAST_S if self.by_cpu else WALL_LEAST_S
        # From here to the end, and not only while calls are timed: a turn that was used up before
        # a call is waited for in it.
        self._begin_s = (time.perf_counter(), self._cpu_s())

    def _cpu_s(self) -> float:
        """Of one thread that computes, all of its process: what others do beside it, waking up now
        and then, comes out of the same share, and would in a training step."""
        return time.process_time() if self.by_cpu else time.thread_time()

    def seconds(self, call: Callable[[], object]) -> float:
        """Raw seconds of one call: the mean of several, after one to warm up.

        A long call is made twice only, and the better one counts.
        """
        first_s = self._batch(call, 1)
        repeats = max(1, int(BATCH_S / max(first_s, 1e-7)))
        found = [self._batch(call, repeats)]
        total_s = found[0] * repeats
        while total_s < self._least_s and len(found) < MOST_BATCHES:
            found.append(self._batch(call, repeats))
            total_s += found[-1] * repeats
        return min(first_s, found[0]) if len(found) == 1 else sum(found) / len(found)

    def _batch(self, call: Callable[[], object], repeats: int) -> float:
        begin_s = self._clock()
        for _ in range(repeats):
            call()
        return (self._clock() - begin_s) / repeats

    @property
    def stretch(self) -> float:
        """Seconds of the device for a raw second."""
        return self.seconds_per_cpu_s if self.by_cpu else 1.0

    @property
    def seconds_per_cpu_s(self) -> float:
        """Wall time over processor time; this thread must not have slept so far."""
        began_s, began_cpu_s = self._begin_s
        wall_s, cpu_s = time.perf_counter() - began_s, self._cpu_s() - began_cpu_s
        return max(1.0, wall_s / cpu_s) if cpu_s > 0 else 1.0

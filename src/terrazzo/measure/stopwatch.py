"""The stopwatch: seconds of a call, also where a device computes in short turns.

Under a quota of processor time (an emulated device, a container) a call either fits into a turn or
waits for the next, so the wall time of one short call says nothing. With one thread the processor
time of calls is taken instead, and all of them are stretched by how long the device took for it
over the whole session. With several threads processor time is no measure: wall time is, over calls
repeated long enough to average over turns.

Every turn begins with caches that others have filled meanwhile. That is part of computing in turns,
and lost on a median of short batches: so it is the mean that counts, over several turns.

A GPU is launched into: a call returns before its work is done. Its wall time is taken from an idle
GPU to an idle GPU, over a batch so long that launches and kernels run side by side as they do in a
step. What takes longer of the two counts, and the first calls, which load kernels, do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from terrazzo.measure.accelerator import CPU, settle

CPU_LEAST_S = 3e-3
WALL_LEAST_S = 30e-3
GPU_LEAST_S = 10e-3
BATCH_S, GPU_BATCH_S = 1.5e-4, 1e-3
"""Calls are timed in batches at least so long: reading the clock takes a part of a microsecond,
waiting for a GPU some ten."""
MOST_BATCHES = 30
GPU_WARM = 2


class Stopwatch:
    """Gives raw seconds; ``stretch`` is what makes them seconds of the device."""

    def __init__(self, threads: int, torch_device: torch.device = CPU) -> None:
        self.torch_device = torch_device
        self._launches = torch_device.type != CPU.type
        self.by_cpu = threads == 1 and not self._launches
        self._clock = time.thread_time if self.by_cpu else time.perf_counter
        self._least_s = CPU_LEAST_S if self.by_cpu else WALL_LEAST_S
        self._batch_s, self._warm = BATCH_S, 0
        if self._launches:
            self._least_s, self._batch_s, self._warm = GPU_LEAST_S, GPU_BATCH_S, GPU_WARM
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
        for _ in range(self._warm):
            self._batch(call, 1)
        first_s = self._batch(call, 1)
        repeats = max(1, int(self._batch_s / max(first_s, 1e-7)))
        found = [self._batch(call, repeats)]
        total_s = found[0] * repeats
        while total_s < self._least_s and len(found) < MOST_BATCHES:
            found.append(self._batch(call, repeats))
            total_s += found[-1] * repeats
        return min(first_s, found[0]) if len(found) == 1 else sum(found) / len(found)

    def _batch(self, call: Callable[[], object], repeats: int) -> float:
        if self._launches:
            settle(self.torch_device)
        begin_s = self._clock()
        for _ in range(repeats):
            call()
        self._end()
        return (self._clock() - begin_s) / repeats

    def _end(self) -> None:
        if self._launches:
            settle(self.torch_device)

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


class Launches(Stopwatch):
    """Counts what calls take of the processor alone: on a GPU, launching them."""

    def __init__(self, torch_device: torch.device = CPU) -> None:
        super().__init__(1, torch_device)
        self._clock = processor_clock(torch_device)

    def _end(self) -> None:
        """The GPU may go on; it is waited for before the next batch begins."""


def processor_clock(torch_device: torch.device) -> Callable[[], float]:
    """Processor time of all that computes for this thread.

    For a GPU torch runs backward passes in a thread of its own, and this one sleeps meanwhile.
    """
    if torch_device.type == CPU.type:
        return time.thread_time
    threads = {threading.get_ident(), backward_thread(torch_device)}
    clocks = [time.pthread_getcpuclockid(thread) for thread in threads]
    return lambda: sum(map(time.clock_gettime, clocks))


def backward_thread(torch_device: torch.device) -> int:
    """The thread in which torch computes gradients of what lies there."""
    found: list[int] = []
    result = torch.zeros(1, device=torch_device, requires_grad=True) * 2.0
    result.register_hook(lambda _: found.append(threading.get_ident()))  # type: ignore[no-untyped-call]
    torch.autograd.backward(result.sum())
    return found[0]

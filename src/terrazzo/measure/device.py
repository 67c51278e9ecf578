"""One device measured: its operators within a budget of time, then the basics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from terrazzo.measure.basics import (
    calls_s,
    copy_bytes_per_s,
    fresh_s_per_byte,
    update_s_per_element,
)
from terrazzo.measure.key import power_state
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.timing import keep_memory, smaller, stretched, time_trial
from terrazzo.measure.trials import Trial, trials
from terrazzo.records import Graph
from terrazzo.records.graph import BYTES
from terrazzo.records.machine import Machine
from terrazzo.records.profile import DeviceProfile, Timing
from terrazzo.runtime.allocator import trim

CALLS = 6
"""Of a trial that is long: three directions, twice each."""
CHEAP_FLOPS = 30
"""What an element of other operators counts as, in operations of a product."""
LARGEST_PART = 0.15
"""No single trial may take more of the budget."""
IDLE_BYTES = 250 << 20
HELD = 5
"""A trial holds its maps, their gradients, and copies of both in a kernel's own order."""
LARGE_BYTES = 8 << 20
"""What larger trials leave free is given back: pieces of it would add up to the device's limit."""
LEAST_FLOPS = 10**8
"""What a trial counts as however small it is: making tensors, reading the clock."""
FIRST_GUESS_FLOPS_PER_S = 2e9


@dataclass(frozen=True, slots=True)
class Terms:
    """What a device is called, may use, and how long it may measure."""

    name: str
    memory_bytes: int
    budget_s: float


def warm_up() -> None:
    """Everything once, on next to nothing: first calls load half of torch, which takes seconds."""
    watch = Stopwatch(1)
    calls_s(watch), update_s_per_element(watch, elements=8)
    x, weight = (torch.zeros(1, 8, 16, 16).requires_grad_() for _ in range(2))
    result = torch.conv2d(x, weight[:, :, :3, :3], padding=1)
    torch.autograd.grad(result.sum(), [x, weight])


def measure_device(graph: Graph, terms: Terms, say: Callable[[str], None]) -> DeviceProfile:
    """Everything a device does alone; others should be doing the same at this time."""
    keep_memory()
    began_s = time.perf_counter()
    threads, machine = torch.get_num_threads(), Machine.here()
    memory_bytes = terms.memory_bytes or machine.memory_bytes
    watch = Stopwatch(threads)
    calls, copied = calls_s(watch), copy_bytes_per_s(watch)
    updates, fresh = update_s_per_element(watch), fresh_s_per_byte()
    chosen = [t for t in trials(graph) if _fits(t, memory_bytes)]
    timings = _timed(chosen, watch, terms.budget_s, say)
    stretch = watch.stretch
    return DeviceProfile(
        name=terms.name,
        machine=machine,
        power=power_state(),
        threads=threads,
        memory_bytes=memory_bytes,
        seconds_per_cpu_s=watch.seconds_per_cpu_s,
        calls_s=(calls[0] * stretch, calls[1] * stretch),
        copy_bytes_per_s=copied / stretch,
        fresh_s_per_byte=fresh * watch.seconds_per_cpu_s,
        update_s_per_element={name: each * stretch for name, each in updates.items()},
        timings=tuple(stretched(timing, stretch) for timing in timings),
        took_s=time.perf_counter() - began_s,
        left_out=len(chosen) - len(timings),
    )


def _timed(
    chosen: Sequence[Trial], watch: Stopwatch, budget_s: float, say: Callable[[str], None]
) -> list[Timing]:
    """The trials in their order, without those for which there is no time left.

    Where time is left, all are timed again: something else may have been using the device for a
    while, and of two figures the smaller one is nearer to the truth.
    """
    end_s = time.perf_counter() + budget_s
    found: dict[int, Timing] = {}
    pace = _Pace()
    for round_name in ("operators", "operators, again"):
        for place, trial in enumerate(chosen):
            needs_s = pace.needs_s(trial)
            if needs_s > min(end_s - time.perf_counter(), LARGEST_PART * budget_s):
                continue
            if place % 20 == 0:
                say(f"{round_name}: {place} of {len(chosen)}")
            begin_s = time.perf_counter()
            timing = time_trial(trial, watch)
            found[place] = smaller(found[place], timing) if place in found else timing
            if _bytes(trial) > LARGE_BYTES:
                trim()
            pace.note(trial, time.perf_counter() - begin_s)
    return list(found.values())


@dataclass
class _Pace:
    """How long trials take, by the work in them, from those that were made."""

    work: float = FIRST_GUESS_FLOPS_PER_S
    spent_s: float = 1.0

    def needs_s(self, trial: Trial) -> float:
        return _work(trial) * self.spent_s / self.work

    def note(self, trial: Trial, spent_s: float) -> None:
        if self.work == FIRST_GUESS_FLOPS_PER_S:
            self.work = self.spent_s = 0.0
        self.work += _work(trial)
        self.spent_s += spent_s


def _work(trial: Trial) -> int:
    return CALLS * (trial.load.flops or CHEAP_FLOPS * trial.load.reads) + LEAST_FLOPS


def _fits(trial: Trial, memory_bytes: int) -> bool:
    return HELD * _bytes(trial) < max(memory_bytes - IDLE_BYTES, IDLE_BYTES // 2)


def _bytes(trial: Trial) -> int:
    load = trial.load
    return BYTES.get(trial.dtypes[0], 4) * (load.reads + load.writes + load.weights)

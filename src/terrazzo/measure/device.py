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
from terrazzo.measure.timing import keep_memory, stretched, time_trial
from terrazzo.measure.trials import Trial, trials
from terrazzo.records import Graph
from terrazzo.records.graph import BYTES
from terrazzo.records.machine import Machine
from terrazzo.records.profile import DeviceProfile, Timing

CALLS = 6
"""Of a trial that is long: three directions, twice each."""
CHEAP_FLOPS = 30
"""What an element of other operators counts as, in operations of a product."""
LARGEST_PART = 0.15
"""No single trial may take more of the budget."""
IDLE_BYTES = 250 << 20
HELD = 5
"""A trial holds its maps, their gradients, and copies of both in a kernel's own order."""
FIRST_GUESS_FLOPS_PER_S = 2e9


@dataclass(frozen=True, slots=True)
class Terms:
    """What a device is called, may use, and how long it may measure."""

    name: str
    memory_bytes: int
    budget_s: float


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
    """The trials in their order, without those for which there is no time left."""
    found: list[Timing] = []
    flops, spent_s = 0.0, 0.0
    end_s = time.perf_counter() + budget_s
    for place, trial in enumerate(chosen):
        begin_s = time.perf_counter()
        rate = flops / spent_s if spent_s else FIRST_GUESS_FLOPS_PER_S
        needs_s = CALLS * _work(trial) / rate
        if needs_s > min(end_s - begin_s, LARGEST_PART * budget_s):
            continue
        if place % 20 == 0:
            say(f"operators: {place} of {len(chosen)}")
        found.append(time_trial(trial, watch))
        spent_s += time.perf_counter() - begin_s
        flops += CALLS * _work(trial)
    return found


def _work(trial: Trial) -> int:
    return trial.load.flops or CHEAP_FLOPS * trial.load.reads


def _fits(trial: Trial, memory_bytes: int) -> bool:
    size = BYTES.get(trial.dtypes[0], 4) * (trial.load.reads + trial.load.writes)
    weights = BYTES.get(trial.dtypes[0], 4) * trial.load.weights
    return HELD * (size + weights) < max(memory_bytes - IDLE_BYTES, IDLE_BYTES // 2)

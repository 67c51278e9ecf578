"""One device measured: its operators within a budget of time, then the basics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from terrazzo.measure.accelerator import CPU, give_back, settle, title
from terrazzo.measure.basics import (
    calls_s,
    copy_bytes_per_s,
    fresh_s_per_byte,
    saved_s,
    update_s_per_element,
)
from terrazzo.measure.key import power_state
from terrazzo.measure.kin import ALONE, Share, look
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.timing import between, keep_memory, smaller, time_trial
from terrazzo.measure.trials import Trial, trials
from terrazzo.planner.rates import doubtful
from terrazzo.records import Graph
from terrazzo.records.graph import BYTES
from terrazzo.records.machine import Machine
from terrazzo.records.profile import DeviceProfile, Timing
from terrazzo.runtime.allocator import trim
from terrazzo.runtime.arithmetic import full_float32

CALLS = 6
"""Of a trial that is long: three directions, twice each."""
CHEAP_FLOPS = 30
"""What an element of other operators counts as, in operations of a product."""
COMMON, AMONG = 8, 32
"""So many trials are timed by all devices, also by those that share the rest: they tell how fast
each is beside the others."""
FIRST_ROUND = 0.85
"""Part of the budget after which no new trial begins; the rest is for those in doubt."""
LARGEST_PART = 0.3
"""No single trial may take more of the budget. With half as much a small board timed no 3x3
convolution of a whole image: what it spends most on looked a third slower than it is."""
IDLE_BYTES = 250 << 20
HELD = 5
"""A trial holds its maps, their gradients, and copies of both in a kernel's own order."""
LARGE_BYTES = 8 << 20
"""What larger trials leave free is given back: pieces of it would add up to the device's limit."""
LEAST_FLOPS = 10**8
"""What a trial counts as however small it is: making tensors, reading the clock."""
FIRST_GUESS_FLOPS_PER_S = 2e9
GPU_TIMES = 10_000
"""A GPU does so much more in the time that a trial takes at least."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a device is called, may use, how long it may measure, who else does, and where its net
    lies. The memory of a GPU is what is free there, that of a CPU all of it."""

    name: str
    memory_bytes: int
    budget_s: float
    share: Share = ALONE
    torch_device: torch.device = CPU


def warm_up(torch_device: torch.device = CPU) -> None:
    """Everything once, on next to nothing: first calls load half of torch, which takes seconds."""
    watch = Stopwatch(1, torch_device)
    calls_s(watch), update_s_per_element(watch, elements=8)
    shape = (1, 8, 16, 16)
    x, weight = (torch.zeros(shape, device=torch_device).requires_grad_() for _ in range(2))
    result = torch.conv2d(x, weight[:, :, :3, :3], padding=1)
    torch.autograd.grad(result.sum(), [x, weight])
    settle(torch_device)


def measure_device(graph: Graph, terms: Terms, say: Callable[[str], None]) -> DeviceProfile:
    """Everything a device does alone; others should be doing the same at this time."""
    with full_float32(terms.torch_device):
        return _measured(graph, terms, say)


def _measured(graph: Graph, terms: Terms, say: Callable[[str], None]) -> DeviceProfile:
    keep_memory()
    began_s = time.perf_counter()
    threads, machine = torch.get_num_threads(), Machine.here()
    memory_bytes = terms.memory_bytes or machine.memory_bytes
    is_cpu = terms.torch_device.type == CPU.type
    watch = Stopwatch(threads, terms.torch_device)
    calls, copied = calls_s(watch), copy_bytes_per_s(watch)
    updates, fresh = update_s_per_element(watch), fresh_s_per_byte()
    room_bytes = max(memory_bytes - IDLE_BYTES, IDLE_BYTES // 2) if is_cpu else memory_bytes
    chosen = [t for t in trials(graph) if HELD * _bytes(t) < room_bytes]
    timings = _timed(chosen, watch, terms, say)
    stretch, slowness = watch.stretch, watch.seconds_per_cpu_s if is_cpu else _slowness()
    return DeviceProfile(
        name=terms.name,
        machine=machine,
        power=power_state(),
        threads=threads,
        memory_bytes=memory_bytes,
        seconds_per_cpu_s=slowness,
        calls_s=(calls[0] * stretch, calls[1] * stretch),
        copy_bytes_per_s=copied / stretch,
        fresh_s_per_byte=fresh * slowness if is_cpu else 0.0,
        update_s_per_element={name: each * stretch for name, each in updates.items()},
        timings=tuple(timing.stretched(stretch) for timing in timings),
        took_s=time.perf_counter() - began_s,
        left_out=len(chosen) - len(timings),
        saved_s=saved_s(slowness) if is_cpu else 0.0,
        accelerator=title(terms.torch_device),
    )


def _slowness() -> float:
    """Of the processor beside a GPU: it launches, packs and sends."""
    watch = Stopwatch(1)
    look()
    return watch.seconds_per_cpu_s


def _timed(
    chosen: Sequence[Trial], watch: Stopwatch, terms: Terms, say: Callable[[str], None]
) -> list[Timing]:
    """The trials in their order, without those for which there is no time left.

    Something else may be using the device for a while: what looks too slow beside its family is
    timed again, and of two figures the smaller one is nearer to the truth. Where there is still
    time left, everything is, and the mean is taken.
    """
    if chosen and terms.torch_device.type != CPU.type:
        time_trial(chosen[0], watch)  # loads libraries, which would look like a slow GPU
    session = _Session(chosen, watch, terms.budget_s)
    order = terms.share.order(len(chosen), session.shortest(COMMON, of=AMONG))
    session.run(order, FIRST_ROUND, lambda n: say(f"operators: {n} of {len(chosen)}"))
    known = list(session.found)
    again = [known[place] for place in doubtful([session.found[place] for place in known])]
    session.run(again, 1.0, lambda n: say("operators: in doubt"), smaller)
    session.run([place for place in order if place not in session.found], 1.0, lambda n: None)
    session.run(known, 1.0, lambda n: say(f"operators, again: {n} of {len(known)}"))
    return list(session.found.values())


class _Session:
    """Trials being timed, within a budget of seconds."""

    def __init__(self, chosen: Sequence[Trial], watch: Stopwatch, budget_s: float) -> None:
        self.chosen, self.watch, self.budget_s = chosen, watch, budget_s
        self.found: dict[int, Timing] = {}
        times = 1 if watch.torch_device.type == CPU.type else GPU_TIMES
        self._pace = _Pace(LEAST_FLOPS * times, FIRST_GUESS_FLOPS_PER_S * times)
        self._began_s = time.perf_counter()

    def shortest(self, count: int, *, of: int) -> list[int]:
        """So many of the first: those that any device has time for, products before all else."""

        def need(place: int) -> tuple[bool, float]:
            trial = self.chosen[place]
            return not trial.load.is_product, self._pace.needs_s(trial)

        return sorted(range(min(of, len(self.chosen))), key=need)[:count]

    def run(
        self,
        places: Iterable[int],
        part: float,
        say: Callable[[int], None],
        of_two: Callable[[Timing, Timing], Timing] = between,
    ) -> None:
        """Times some of them, as long as ``part`` of the budget is not used up."""
        for count, place in enumerate(places):
            trial = self.chosen[place]
            begin_s = time.perf_counter()
            left_s = self._began_s + part * self.budget_s - begin_s
            if self._pace.needs_s(trial) > min(left_s, LARGEST_PART * self.budget_s):
                continue
            if count % 20 == 0:
                say(count)
            timing = time_trial(trial, self.watch)
            before = self.found.get(place)
            self.found[place] = timing if before is None else of_two(before, timing)
            if _bytes(trial) > LARGE_BYTES:
                trim()
                give_back(self.watch.torch_device)
            self._pace.note(trial, time.perf_counter() - begin_s)


@dataclass
class _Pace:
    """How long trials take, by the work in them, from those that were made."""

    least: int
    guess: float
    work: float = 0.0
    spent_s: float = 0.0

    def needs_s(self, trial: Trial) -> float:
        pace = self.spent_s / self.work if self.work else 1.0 / self.guess
        return self._work(trial) * pace

    def note(self, trial: Trial, spent_s: float) -> None:
        self.work += self._work(trial)
        self.spent_s += spent_s

    def _work(self, trial: Trial) -> int:
        return CALLS * (trial.load.flops or CHEAP_FLOPS * trial.load.reads) + self.least


def _bytes(trial: Trial) -> int:
    load = trial.load
    return BYTES.get(trial.dtypes[0], 4) * (load.reads + load.writes + load.weights)

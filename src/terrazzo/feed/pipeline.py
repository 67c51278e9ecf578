"""The pipeline as numbers: what a step takes with other workers, memory, storage or pictures.

A batch is fetched, prepared and collated; the training loop takes it and computes. Made inside of
the loop, times add up. Made beside it by workers, they are played through on a clock of their own:
whoever computes shares the cores with all who do, whoever reads shares the medium, workers stop
when enough batches are ready, and the loop waits when none is. No two batches take the same time,
or workers would march in step as they never do.

Nothing here is measured: stage costs come from a record, what readers get when they share a medium
from ``records.storage``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from terrazzo.records.storage import Storage

LOOP, STORAGE, CPU = "loop", "storage", "CPU"
AHEAD = 2
"""Batches that each worker may be ahead, as a DataLoader has it."""
VARIES = 0.2
"""By how much batches differ, as a part of what they take."""
PLAYED = 100
"""Steps that are counted, after about as many that are not."""
SMALL = 0.02
"""A stall below this part of a step is none."""
FREE = ((1, 1.0), (64, 1.0))
"""Readers that do not feel each other."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a step and its batch cost, each stage alone and undisturbed."""

    loop_s: float
    """Of the training loop: computing, copying, sending."""
    loop_cpu_s: float
    """Processor time of it, all threads together."""
    fetch_s: float
    prepare_s: float
    """With collating, which is processor time of the same worker."""
    workers: int
    """0: the loop makes its batches itself."""
    cores: float
    sharing: tuple[tuple[int, float], ...] = FREE
    """How many times as long as alone a read takes while so many are under way."""
    floor_s: float = 0.0
    """What the bytes of a batch take at the full rate of the medium: no step is shorter."""

    @property
    def whole_cores(self) -> float:
        """Under a quota of less than one core, that part is the core that stages were timed on."""
        return max(self.cores, 1.0)

    @property
    def loop_threads(self) -> float:
        """Cores that the loop keeps busy on average."""
        if not self.loop_s:
            return 1.0
        return min(self.loop_cpu_s / self.loop_s / min(self.cores, 1.0), self.whole_cores)

    @property
    def step_s(self) -> float:
        made_s = self.fetch_s + self.prepare_s
        if self.workers == 0:
            return max(self.loop_s + made_s, self.floor_s)
        return max(_played(self), self.floor_s) if made_s > 0 else self.loop_s

    @property
    def limit(self) -> str:
        """What would help most if it cost nothing; the loop, where little is waited for."""
        step_s = self.step_s
        if step_s <= (1 + SMALL) * self.loop_s:
            return LOOP
        free = {
            STORAGE: replace(self, fetch_s=0.0, floor_s=0.0),
            CPU: replace(self, prepare_s=0.0, cores=math.inf),
        }
        return min(free, key=lambda name: free[name].step_s)

    @property
    def stall_s(self) -> float:
        """Of a step, what it takes longer than the loop alone."""
        return max(0.0, self.step_s - self.loop_s)

    # ---- changes -------------------------------------------------------------------------

    def with_workers(self, workers: int) -> Pipeline:
        return replace(self, workers=workers)

    def with_cache(self, share: float, *, decoded: bool = False) -> Pipeline:
        """So much of the data set held in memory, as it is stored or ready to collate."""
        left = 1.0 - min(max(share, 0.0), 1.0)
        prepare_s = self.prepare_s * left if decoded else self.prepare_s
        return replace(self.with_storage(left), prepare_s=prepare_s)

    def with_storage(self, times: float, sharing: Sequence[tuple[int, float]] = ()) -> Pipeline:
        """Reads that take so many times as long as now; ``sharing`` is the other medium's."""
        found = tuple(sharing) or self.sharing
        fetch_s, floor_s = self.fetch_s * times, self.floor_s * times
        return replace(self, fetch_s=fetch_s, floor_s=floor_s, sharing=found)

    def with_pictures(self, fetch: float, prepare: float) -> Pipeline:
        """Other stored pictures: parts of what fetching and preparing take now."""
        return replace(self.with_storage(fetch), prepare_s=self.prepare_s * prepare)


@dataclass(slots=True)
class _Job:
    """What somebody is at, and how much of it is left, in seconds of doing it alone."""

    reads: bool
    left_s: float
    batch: int


@lru_cache(maxsize=1 << 10)
def _played(pipeline: Pipeline) -> float:
    """The average step once queues have filled or run dry."""
    workers = pipeline.workers
    settled = PLAYED // 2 + AHEAD * workers
    draw = random.Random(0)  # the same ones each time: a change is judged by itself alone

    def about(seconds: float) -> float:
        return seconds * draw.uniform(1 - VARIES, 1 + VARIES)

    jobs: dict[int, _Job] = {}
    """By worker; the loop is the last of them."""
    ready: set[int] = set()
    now_s = begin_s = 0.0
    given = at = 0
    while True:
        for worker in range(workers):
            if worker not in jobs and given < at + AHEAD * workers:
                jobs[worker] = _Job(True, about(pipeline.fetch_s), given)
                given += 1
        if workers not in jobs and at in ready:
            ready.remove(at)
            jobs[workers] = _Job(False, pipeline.loop_s, at)
        rates = _rates(pipeline, jobs)
        passed_s, who = min((job.left_s / rates[who], who) for who, job in jobs.items())
        now_s += passed_s
        for other, job in jobs.items():
            job.left_s -= passed_s * rates[other]
        done = jobs.pop(who)
        if done.reads:
            jobs[who] = _Job(False, about(pipeline.prepare_s), done.batch)
        elif who < workers:
            ready.add(done.batch)
        else:
            at += 1
            if at == settled:
                begin_s = now_s
            elif at == settled + PLAYED:
                return (now_s - begin_s) / PLAYED


def _rates(pipeline: Pipeline, jobs: Mapping[int, _Job]) -> dict[int, float]:
    """How fast each goes on, 1 being as fast as alone."""
    readers = sum(job.reads for job in jobs.values())
    wanted = {
        who: pipeline.loop_threads if who == pipeline.workers else 1.0
        for who, job in jobs.items()
        if not job.reads
    }
    reading = 1.0 / slowdown(pipeline.sharing, readers) if readers else 1.0
    computing = min(1.0, pipeline.whole_cores / sum(wanted.values())) if wanted else 1.0
    return {who: reading if job.reads else computing for who, job in jobs.items()}


def slowdown(sharing: Sequence[tuple[int, float]], readers: int) -> float:
    """Between measured counts along straight lines; beyond them no more is read in a second."""
    rows = sorted(sharing)
    if readers <= rows[0][0]:
        return rows[0][1]
    last, slowest = rows[-1]
    if readers >= last:
        return slowest * readers / last
    low, high = next(pair for pair in pairwise(rows) if readers <= pair[1][0])
    return low[1] + (high[1] - low[1]) * (readers - low[0]) / (high[0] - low[0])


def sharing_of(storage: Storage, size_bytes: float) -> tuple[tuple[int, float], ...]:
    """How readers of so many bytes each slow each other down on a measured medium."""
    counts = sorted({row.readers for row in storage.random})
    alone_s = storage.read_s(size_bytes)
    return tuple((n, max(1.0, storage.read_s(size_bytes, readers=n) / alone_s)) for n in counts)


def fewest_workers(pipeline: Pipeline, *, most: int, within: float = 0.02) -> int:
    """The smallest number of workers that is nearly as fast as the best one up to ``most``."""
    steps = [pipeline.with_workers(count).step_s for count in range(most + 1)]
    best = min(steps)
    return next(count for count, step_s in enumerate(steps) if step_s <= best * (1 + within))

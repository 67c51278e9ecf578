"""A training loop and its workers in virtual time: what happens, to be held against predictions.

It knows what a prediction does not: every batch and every step takes a time of its own, up to a
fifth more or less, and cores are given out fairly, to small wishes first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from terrazzo.records.event import Event
from terrazzo.records.stage import BESIDE, COLLATE, FETCH, IN_LOOP, INLINE, PHASE, PREPARE, WAIT

AHEAD = 2
"""Batches that each worker may be ahead."""


@dataclass(frozen=True)
class World:
    loop_s: float
    threads: float
    """Cores that the loop keeps busy while it computes."""
    fetch_s: float
    prepare_s: float
    collate_s: float = 0.0
    cores: float = 8.0
    workers: int = 0
    varies: float = 0.0
    """By how much batches and steps differ from each other, as a part of what they take."""
    reading: Callable[[int], float] = field(default=lambda readers: 1.0)
    """How many times as long as alone a read takes while so many are under way."""


@dataclass
class Job:
    kind: str
    left_s: float
    worker: int
    batch: int
    begin_s: float


def run(world: World, steps: int) -> list[Event]:
    """The events of so many steps, as a feed records them."""
    return _inline(world, steps) if world.workers == 0 else _beside(world, steps)


def _inline(world: World, steps: int) -> list[Event]:
    draw = random.Random(steps)
    events, now_s = [], 0.0
    for batch in range(steps):
        begin_s = now_s
        stages = ((FETCH, world.fetch_s), (PREPARE, world.prepare_s), (COLLATE, world.collate_s))
        for stage, usual_s in stages:
            length_s = usual_s * _factor(world, draw)
            events.append(_event(BESIDE, stage, now_s, now_s + length_s, batch, INLINE))
            now_s += length_s
        events.append(_event(IN_LOOP, WAIT, begin_s, now_s, batch, INLINE))
        now_s += world.loop_s * _factor(world, draw)
    return events


def _factor(world: World, draw: random.Random) -> float:
    return draw.uniform(1 - world.varies, 1 + world.varies)


def _beside(world: World, steps: int) -> list[Event]:
    events: list[Event] = []
    draw = random.Random(steps)
    jobs: dict[int, Job] = {}  # by worker; the loop is -1
    ready: set[int] = set()
    now_s, next_batch, at, wait_from = 0.0, 0, 0, 0.0
    while at < steps:
        for worker in range(world.workers):
            if worker not in jobs and next_batch < at + AHEAD * world.workers:
                fetch_s = world.fetch_s * _factor(world, draw)
                jobs[worker] = Job(FETCH, fetch_s, worker, next_batch, now_s)
                next_batch += 1
        if -1 not in jobs and at in ready:
            events.append(_event(IN_LOOP, WAIT, wait_from, now_s, at, INLINE))
            jobs[-1] = Job("loop", world.loop_s * _factor(world, draw), -1, at, now_s)
        rates = _rates(world, jobs)
        step_s, first = min((jobs[who].left_s / rates[who], who) for who in jobs)
        now_s += step_s
        for who, job in jobs.items():
            job.left_s -= step_s * rates[who]
        done = jobs.pop(first)
        if done.kind == "loop":
            at, wait_from = at + 1, now_s
            continue
        events.append(_event(BESIDE, done.kind, done.begin_s, now_s, done.batch, done.worker))
        after = {FETCH: (PREPARE, world.prepare_s), PREPARE: (COLLATE, world.collate_s)}
        if done.kind in after:
            kind, length_s = after[done.kind]
            length_s = max(length_s * _factor(world, draw), 1e-9)
            jobs[first] = Job(kind, length_s, first, done.batch, now_s)
        else:
            ready.add(done.batch)
    return events


def _rates(world: World, jobs: dict[int, Job]) -> dict[int, float]:
    """How fast each goes on, 1 being as fast as alone."""
    readers = sum(job.kind == FETCH for job in jobs.values())
    wanted = {
        who: world.threads if job.kind == "loop" else 1.0
        for who, job in jobs.items()
        if job.kind != FETCH
    }
    given = _fairly(wanted, world.cores)
    return {
        who: 1.0 / world.reading(readers) if job.kind == FETCH else given[who] / wanted[who]
        for who, job in jobs.items()
    }


def _fairly(wanted: dict[int, float], cores: float) -> dict[int, float]:
    """Small wishes are met, large ones share what is left."""
    given, left = {}, cores
    for number, who in enumerate(sorted(wanted, key=lambda one: wanted[one])):
        given[who] = min(wanted[who], left / (len(wanted) - number))
        left -= given[who]
    return given


def _event(kind: str, stage: str, begin_s: float, end_s: float, batch: int, worker: int) -> Event:
    told = (("epoch", 0.0), ("batch", float(batch)), ("worker", float(worker)), ("samples", 4.0))
    size = 40_000 if stage == FETCH else 0
    return Event(0, batch, PHASE, kind, stage, begin_s, end_s, size, told)

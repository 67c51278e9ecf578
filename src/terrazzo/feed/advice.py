"""Advice: what limits a training's input, what each change would gain, and which to make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from terrazzo.feed.pipeline import CPU, LOOP, SMALL, STORAGE, Pipeline, fewest_workers
from terrazzo.feed.stalls import Stalls
from terrazzo.feed.tuner import MOST_WORKERS
from terrazzo.records.storage import Storage
from terrazzo.records.units import bytes_text, count_text

NONE, MEMORY, LINK, DATASET = "nothing", "memory", "link", "data set"
WORTH = 0.05
"""A change that saves less of a step is not recommended."""
SYSTEM = 2
SYSTEM_WORDS = "; after the first epoch the system may hold it too, while so much stays free"
"""Said where so many times as much memory is free as the data set has."""
CACHES_BYTES = (64 << 20, 256 << 20, 1 << 30)
BESIDE_BYTES = 256
"""What holding a sample takes besides its bytes: its name, its mark, and where it lies."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Medium:
    """A kind of storage by its usual figures: a request's time, and bytes a second of all."""

    name: str
    request_s: float
    bytes_per_s: float
    parallel: int
    """Requests that it works on at once."""

    def read_s(self, size_bytes: float) -> float:
        return self.request_s + size_bytes / self.bytes_per_s

    def sharing(self, size_bytes: float) -> tuple[tuple[int, float], ...]:
        """Requests overlap up to so many, bytes share the medium."""
        alone_s = self.read_s(size_bytes)
        rows = []
        for readers in (1, 2, 4, 8, 16):
            queue_s = self.request_s * max(1.0, readers / self.parallel)
            moved_s = size_bytes / self.bytes_per_s
            each_s = max(queue_s + moved_s, readers * moved_s)
            rows.append((readers, max(1.0, each_s / alone_s)))
        return tuple(rows)


MEDIA = (
    Medium("SD card (A1)", 0.7e-3, 40e6, 2),
    Medium("hard disk", 8e-3, 150e6, 1),
    Medium("SATA SSD", 0.12e-3, 500e6, 16),
    Medium("NVMe SSD", 0.08e-3, 2500e6, 16),
)
"""From cheap to dear; figures as they are usual for such media, nothing here was measured."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known besides stages."""

    samples: int
    """In the data set; 0: not known."""
    batch: float
    """Samples of a step."""
    stored_bytes: float
    """Of a sample, as it was read."""
    decoded_bytes: float
    """Of a sample in a batch."""
    free_bytes: int
    """Memory that nobody uses; 0: not known."""
    most_workers: int = MOST_WORKERS
    stays: str = ""
    """Why batches are made where they are, and not by other workers; empty: they need not."""

    @property
    def set_bytes(self) -> float:
        return self.samples * self.stored_bytes


@dataclass(frozen=True, slots=True)
class Gain:
    """A change, and the step it would give."""

    change: str
    step_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    limit: str
    """One of nothing, storage, CPU, memory, link, data set."""
    why: str
    gains: tuple[Gain, ...]
    media: tuple[tuple[str, int, float], ...]
    """Other media: with how many workers, and the step."""
    settings: tuple[str, ...]


def advise(now: Pipeline, seen: Stalls, facts: Facts, *, storage: Storage | None = None) -> Advice:
    """``now`` is the pipeline as it was set up, ``seen`` what its steps were spent on."""
    limit, why = _limit(now, seen)
    if limit == STORAGE and not facts.stored_bytes:
        limit = DATASET
        why = (
            "samples wait in the data set, and nothing was seen to be read from files: for a "
            "sleep, a lock, another computer, or a file that is mapped into memory"
        )
    if limit == STORAGE and facts.free_bytes and facts.free_bytes / 2 < facts.set_bytes:
        room, whole = bytes_text(facts.free_bytes / 2), bytes_text(facts.set_bytes)
        why += f"; memory has room for {room} of the {whole} of data"
    gains = (
        *_workers(now, facts),
        *_caches(now, facts),
        *(_faster(now) if facts.stored_bytes else ()),
        *(_smaller(now) if facts.stored_bytes else ()),
        *(_packed(now, storage) if facts.stored_bytes else ()),
    )
    return Advice(limit, why, gains, tuple(_media(now, facts)), _settings(now, facts, storage))


def _limit(now: Pipeline, seen: Stalls) -> tuple[str, str]:
    stalls = {"wait": seen.wait_s, "copy": seen.copy_s, "deliver": seen.deliver_s}
    most = max(stalls, key=lambda name: stalls[name])
    share = seen.stall_s / seen.step_s
    if share < SMALL:
        return NONE, f"{share:.1%} of a step is not computing: there is nothing to gain here"
    if most == "deliver":
        return LINK, "the input is sent to the other devices over the link of the one that reads"
    if most == "copy":
        return MEMORY, "batches are copied to where the model is"
    if now.limit == LOOP:  # workers keep up on average, and still it waits now and then
        fetches = seen.wait_fetch_s >= seen.wait_prepare_s
        return (STORAGE, "some batches come late") if fetches else (CPU, "some batches come late")
    if now.workers == 0:
        what = "reading" if now.limit == STORAGE else "pre-processing"
        return now.limit, f"the training loop itself makes its batches, and {what} takes longest"
    whose = count_text(now.workers, "worker")
    if now.limit == STORAGE:
        return STORAGE, f"{whose} cannot read as fast as the model trains"
    if now.loop_threads + now.prepare_s / now.loop_s > (1 + SMALL) * now.whole_cores:
        return CPU, f"training and pre-processing need more than the {now.cores:g} cores there are"
    return CPU, f"{whose} cannot pre-process as fast as the model trains"


def _workers(now: Pipeline, facts: Facts) -> Iterator[Gain]:
    for count in () if facts.stays else (0, 1, 2, 4, 8):
        if count <= facts.most_workers and count != now.workers:
            word = count_text(count, "worker") if count else "no workers"
            yield Gain(word, now.with_workers(count).step_s)


def _caches(now: Pipeline, facts: Facts) -> Iterator[Gain]:
    """Samples as they are stored; and decoded, where all that is random comes after that."""
    if not facts.set_bytes:
        return
    sizes = [size for size in CACHES_BYTES if size < facts.set_bytes]
    for size in (*(sizes or [int(facts.set_bytes / 2)]), int(facts.set_bytes)):
        share = size / facts.set_bytes
        step_s = now.with_cache(share).step_s
        yield Gain(f"{bytes_text(size)} of cache, {share:.0%} of the data set", step_s)
    decoded = facts.samples * facts.decoded_bytes
    if decoded:
        step_s = now.with_cache(1.0, decoded=True).step_s
        yield Gain(f"{bytes_text(decoded)} of cache, all of it decoded", step_s)


def _faster(now: Pipeline) -> Iterator[Gain]:
    for times in (2, 10):
        yield Gain(f"storage {times} times as fast", now.with_storage(1 / times).step_s)


def _smaller(now: Pipeline) -> Iterator[Gain]:
    yield Gain("stored pictures of half the pixels", now.with_pictures(0.5, 0.5).step_s)


def _packed(now: Pipeline, storage: Storage | None) -> Iterator[Gain]:
    if storage is None or storage.files is None:
        return
    times = min(1.0, storage.read_s(storage.files.size_bytes) / storage.files.each_s)
    yield Gain("files packed into shards", now.with_storage(times).step_s)


def _media(now: Pipeline, facts: Facts) -> Iterator[tuple[str, int, float]]:
    """For every medium, the workers it takes to be as fast as it can be."""
    if not facts.stored_bytes:
        return
    for medium in MEDIA:
        batch = _on(now, facts, medium)
        count = _count(batch, facts)
        yield medium.name, count, batch.with_workers(count).step_s


def _count(now: Pipeline, facts: Facts) -> int:
    """Of workers that are enough, where their number is free."""
    return now.workers if facts.stays else fewest_workers(now, most=facts.most_workers)


def _on(now: Pipeline, facts: Facts, medium: Medium) -> Pipeline:
    """The pipeline with its data on another medium."""
    return replace(
        now,
        fetch_s=facts.batch * medium.read_s(facts.stored_bytes),
        sharing=medium.sharing(facts.stored_bytes),
        floor_s=facts.batch * facts.stored_bytes / medium.bytes_per_s,
    )


def _settings(now: Pipeline, facts: Facts, storage: Storage | None) -> tuple[str, ...]:
    """What to do, each change judged after those before it."""
    found = []
    count = _count(now, facts)
    best = now.with_workers(count)
    if best.step_s < (1 - WORTH) * now.step_s:
        found.append(f"workers={count}")
    elif now.workers > count:
        best = now.with_workers(count)
        found.append(f"workers={count}: more do not help")
    else:
        best = now
    if facts.stays and now.stall_s > SMALL * now.step_s:
        found.append(f"batches are made in the training process: {facts.stays}")
    for gain in _packed(best, storage):
        if gain.step_s < (1 - WORTH) * best.step_s:
            found.append("terrazzo data pack: small files cost more than their bytes")
    if facts.set_bytes and best.limit == STORAGE:
        whole = facts.set_bytes + facts.samples * BESIDE_BYTES
        room = min(facts.free_bytes / 2, whole)
        share = room / whole
        cached = best.with_cache(share)
        if cached.step_s < (1 - WORTH) * best.step_s:
            size = f'"{ceil(room / MIB) if share == 1 else int(room / MIB)}MiB"'
            alone = "" if facts.free_bytes < SYSTEM * facts.set_bytes else SYSTEM_WORDS
            found.append(f"cache={size}: {share:.0%} of the data set{alone}")
    if best.stall_s > SMALL * best.step_s and best.limit == CPU:
        found.append("store smaller pictures, or simpler transforms: the processor is the limit")
    if found:
        return tuple(found)
    own = count_text(now.workers, "worker") if now.workers else "no workers"
    return (f"leave it as it is: {own}, as tz.feed has found or the script has asked for",)

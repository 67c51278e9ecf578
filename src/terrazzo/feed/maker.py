"""Maker: from the indices of a batch to the batch, in the training process or in a worker.

It does what a DataLoader does with a list of indices, and times it. What a data set does inside of
``dataset[i]`` is told apart by clocks: where its files are watched, reading them is fetching; of
the rest, the time in which it neither computed nor waited for a core was waiting for storage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Subset
from torch.utils.data._utils import worker as torch_worker

from terrazzo.errors import DataError
from terrazzo.feed import draws
from terrazzo.feed.arena import Arena
from terrazzo.feed.files import Files, check
from terrazzo.feed.form import DECODED, ENCODED, freeze, thaw
from terrazzo.feed.pantry import Address
from terrazzo.feed.peers import Peers
from terrazzo.feed.stages import Took
from terrazzo.feed.twosteps import is_in_two_steps
from terrazzo.records.stage import COLLATE, FETCH, PREPARE

CLOCKS, COUNTERS = "/proc/thread-self/schedstat", "/proc/thread-self/io"
OWN_BYTES = 1024
"""What reading the counters themselves may add to them."""


class Place(NamedTuple):
    """Where a sample lies in the arena, and in which form."""

    place: int
    size: int
    form: str


@dataclass(frozen=True)
class Task:
    """What is to be made, and what is known of its samples."""

    indices: Any
    """As the sampler gave them: a list, or one index where batches are not collated."""
    held: Mapping[Any, Place] = field(default_factory=dict)
    """Samples that are in memory."""
    keep: Mapping[Any, str] = field(default_factory=dict)
    """Samples that are to be put there, and the form in which."""
    away: Mapping[Any, Address] = field(default_factory=dict)
    """Samples that another device holds."""
    give: Mapping[Any, Address] = field(default_factory=dict)
    """Samples that another device is to hold, once they are read."""
    stream: draws.Stream | None = None
    states: draws.States | None = None
    """How its worker of the loader begins this batch; None: as it began the epoch."""
    epoch: int = 0


@dataclass
class Made:
    """A batch, or why there is none, and what it took."""

    batch: Any = None
    took: list[Took] = field(default_factory=list)
    states: draws.States | None = None
    """Where the generators stood afterwards; None: nothing was drawn."""
    kept: dict[Any, Place] = field(default_factory=dict)
    given: dict[Any, int] = field(default_factory=dict)
    """Samples that other devices have taken, and which."""
    missed: list[Any] = field(default_factory=list)
    """Samples that another device was to have, and did not give."""
    sizes: list[tuple[str, int, float]] = field(default_factory=list)
    """Forms of samples, their bytes, and the seconds that holding one in that form would save."""
    draws: bool = False
    """Whether a sample that was to be kept drew random numbers, so that it is no constant."""
    bad: list[str] = field(default_factory=list)
    """Samples that were left out, and why."""
    error: BaseException | None = None


@dataclass
class Recipe:
    """How batches are made: what is the same for all of them."""

    dataset: Any
    collate: Callable[[Any], Any]
    collates: bool = True
    """Whether indices come as lists (``batch_size`` of the loader is not None)."""
    skip: bool = False
    """Whether bad samples are left out."""
    key: bytes = b""
    """Of the marks on what other devices hold."""
    seed: int | None = None
    """Samples have their own seeds, made of this one; None: they draw as under a DataLoader."""

    @property
    def in_two_steps(self) -> bool:
        """Whether the data set says itself what is fetching and what is decoding."""
        return is_in_two_steps(self.dataset)

    @property
    def by_sample(self) -> bool:
        """Whether samples can be had one by one."""
        dataset = self.dataset
        while type(dataset) is Subset:  # which has one for the sake of what it is a subset of
            dataset = dataset.dataset
        return self.collates and not getattr(dataset, "__getitems__", None)


class Maker:
    """Makes batches; one for each process."""

    def __init__(self, recipe: Recipe, arena: Arena | None = None, *, watch: bool = False) -> None:
        self.recipe, self.arena = recipe, arena
        self.files = Files() if watch else None
        self.at: Callable[[Any], None] = lambda index: None
        """Told of each sample before it is made, so that its name outlives this process."""
        self.peers = Peers(recipe.key)
        self.measures = True
        """Whether fetching is told from preparing; that takes a moment for each batch."""

    def make(self, task: Task) -> Made:
        """Never raises: an error is part of what was made."""
        meter = _Meter(self.files) if self.measures else _NoMeter()
        found, began = Made(), time.perf_counter()
        self._from_memory = self._from_peers = 0
        middle = began
        try:
            data = self._samples(task, found)
            middle = time.perf_counter()
            meter.stop()
            found.batch = self._collate(data, task)
        except Exception as error:
            found.error = error
            if middle == began:
                middle = time.perf_counter()
                meter.stop()
        count = len(task.indices) if self.recipe.collates else 1
        fetch_s = min(meter.fetch_s, middle - began)
        if self.files is not None:
            self.peers.saw_storage(self.files.read_s, self.files.read_bytes)
        found.took = [
            Took(
                FETCH, began, middle, fetch_s, meter.read_bytes, count,
                self._from_memory, self._from_peers,
            ),
            Took(PREPARE, began, middle, middle - began - fetch_s, 0, count),
            Took(COLLATE, middle, end := time.perf_counter(), end - middle, 0, count),
        ]  # fmt: skip
        return found

    def _samples(self, task: Task, made: Made) -> Any:
        recipe = self.recipe
        if not recipe.by_sample:
            self.at(task.indices)
            if not recipe.collates:
                return recipe.dataset[task.indices]
            return recipe.dataset.__getitems__(task.indices)
        found = []
        for index in task.indices:
            self.at(index)
            if recipe.seed is not None:
                draws.seed_sample(recipe.seed, task.epoch, index)
            try:
                found.append(self._sample(index, task, made))
            except Exception as error:
                told = self._blame(index, error)
                if not recipe.skip:
                    raise told from error
                made.bad.append(str(told))
        if not found:
            raise DataError(
                f"no sample of the batch {_few(task.indices)} could be read: {made.bad[0]}"
            )
        return found

    def _collate(self, data: Any, task: Task) -> Any:
        try:
            return self.recipe.collate(data)
        except Exception as error:
            raise DataError(
                f"samples {_few(task.indices)} could not be put into a batch: "
                f"{type(error).__name__}: {error}. Look at the collate function, and at samples of "
                "different shapes"
            ) from error

    def _sample(self, index: Any, task: Task, made: Made) -> Any:
        held = self._held(task.held.get(index))
        if held is not None and task.held[index].form == DECODED:
            self._from_memory += 1
            stamps, sample = thaw(held)
            check(stamps)
            return sample
        known = None
        if self.files is not None:
            known = held if held is not None else self._from_peer(index, task, made)
            self._from_memory += held is not None
        if index not in task.keep:
            sample = self._read(index, known)
            if known is None and index in task.give:
                self._give(index, task.give[index], made)
            return sample
        states, before = draws.states(), self.files.read_s if self.files else 0.0
        began = time.perf_counter()
        sample = self._read(index, known)
        took_s = time.perf_counter() - began
        read_s = self.files.read_s - before if self.files else 0.0
        drew = not draws.same(states, draws.states())
        made.draws |= drew
        self._keep((index, sample), task.keep[index], made, saves=(read_s, took_s), drew=drew)
        return sample

    def _read(self, index: Any, known: bytes | None) -> Any:
        """A sample, from its encoded bytes where they are known."""
        files, dataset = self.files, self.recipe.dataset
        if files is None:
            return dataset[index]
        if not self.recipe.in_two_steps:
            files.begin(None if known is None else thaw(known))
            return dataset[index]
        files.begin()
        if known is not None:
            return dataset.decode(thaw(known))
        with files.timed():
            data = dataset.fetch(index)
        files.fetched = data
        return dataset.decode(data)

    def _held(self, place: Place | None) -> bytes | None:
        if place is None or self.arena is None:
            return None
        return self.arena.get(place.place, place.size)

    def _from_peer(self, index: Any, task: Task, made: Made) -> bytes | None:
        if index not in task.away:
            return None
        data = self.peers.get(task.away[index], index)
        if data is None:
            made.missed.append(index)
        self._from_peers += data is not None
        return data

    def _give(self, index: Any, address: Address, made: Made) -> None:
        """To the device that is to hold it."""
        assert self.files is not None
        whole = self.files.whole
        if whole is not None:
            data = freeze(whole)
            made.sizes.append((ENCODED, len(data), 0.0))
            if self.peers.put(address, index, data):
                made.given[index] = address.device

    def _keep(
        self,
        named: tuple[Any, Any],
        form: str,
        made: Made,
        *,
        saves: tuple[float, float],
        drew: bool,
    ) -> None:
        """Into the arena; with no form chosen yet, both are weighed."""
        index, sample = named
        files, data = self.files, b""
        if form != DECODED and files is not None and (whole := files.whole) is not None:
            data = freeze(whole)
            made.sizes.append((ENCODED, len(data), saves[0]))
        if form != ENCODED and not drew:
            try:
                data = freeze((files.stamps if files is not None else [], sample))
            except Exception:  # what cannot be pickled cannot be held, and need not be
                return
            made.sizes.append((DECODED, len(data), saves[1]))
        if form and data and self.arena is not None:
            place = self.arena.put(data)
            if place is not None:
                made.kept[index] = Place(place, len(data), form)

    def _blame(self, index: Any, error: Exception) -> DataError:
        name = type(self.recipe.dataset).__name__
        file = "" if self.files is None or not self.files.last else f" (file {self.files.last})"
        return DataError(
            f"sample {index} of {name}{file} could not be read: {type(error).__name__}: {error}. "
            'Repair or remove it, or leave such samples out: tz.feed(..., bad="skip")'
        )


def make_drawn(maker: Maker, task: Task) -> Made:
    """Makes a batch with the generators as its stream wants them, and sees whether it draws."""
    if task.stream is not None:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            task.stream.number, task.stream.workers, task.stream.seed, maker.recipe.dataset
        )
        draws.begin(task.stream)
    if task.states is not None:
        draws.restore(task.states)
    before = draws.states()
    made = maker.make(task)
    if maker.recipe.seed is None:
        after = draws.states()
        made.states = None if draws.same(before, after) else after
    return made


class _Meter:
    """How long was waited for storage since it was made, and how much was read."""

    def __init__(self, files: Files | None) -> None:
        self.files = files
        self.fetch_s, self.read_bytes = 0.0, 0
        self._begin = self._now()
        if files is not None:
            files.read_s = files.cpu_s = 0.0
            files.read_bytes = 0

    def _now(self) -> tuple[float, float, float, int]:
        return time.perf_counter(), time.thread_time(), _waited_s(), _read_bytes()

    def stop(self) -> None:
        wall_s, cpu_s, ready_s, read_bytes = (
            b - a for a, b in zip(self._begin, self._now(), strict=True)
        )
        seen_s = seen_cpu_s = 0.0
        seen_bytes = 0
        if self.files is not None:
            seen_s, seen_cpu_s = self.files.read_s, self.files.cpu_s
            seen_bytes = self.files.read_bytes
        idle_s = (wall_s - seen_s) - (cpu_s - seen_cpu_s) - ready_s
        self.fetch_s = seen_s + max(idle_s, 0.0)
        # The first samples of a worker also load libraries, which is no reading of samples.
        unseen = int(read_bytes) - seen_bytes > max(OWN_BYTES, seen_bytes)
        self.read_bytes = int(read_bytes) if unseen else seen_bytes


class _NoMeter:
    """All is preparing."""

    fetch_s, read_bytes = 0.0, 0

    def stop(self) -> None:
        pass


def _waited_s() -> float:
    """Seconds for which this thread was ready and had no core."""
    words = _read(CLOCKS).split()
    return int(words[1]) * 1e-9 if len(words) > 1 else 0.0


def _read_bytes() -> int:
    """Bytes that this thread has read from files, whether or not the system had them in memory."""
    words = _read(COUNTERS).split(maxsplit=2)
    return int(words[1]) if len(words) > 1 else 0


def _read(path: str) -> bytes:
    """Not by ``open``, which may be the one that watches."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _few(indices: Sequence[Any]) -> str:
    shown = ", ".join(str(index) for index in list(indices)[:8])
    return f"[{shown}, ...]" if len(indices) > 8 else f"[{shown}]"

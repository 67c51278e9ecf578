"""Maker: from the indices of a batch to the batch, in the training process or in a worker.

It does what a DataLoader does with a list of indices, and times it. What a data set does inside of
``dataset[i]`` is told apart by clocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.data._utils import worker as torch_worker

from terrazzo.errors import DataError
from terrazzo.feed import draws
from terrazzo.feed.arena import Arena
from terrazzo.feed.files import Files, Names, check, watched
from terrazzo.feed.form import DECODED, ENCODED, freeze, thaw
from terrazzo.feed.likeness import likeness
from terrazzo.feed.meter import Meter, NoMeter
from terrazzo.feed.pantry import Address
from terrazzo.feed.peers import ABSENT, Peers
from terrazzo.feed.stages import Took
from terrazzo.feed.task import Made, Place, Recipe, Task
from terrazzo.records.stage import COLLATE, FETCH, PREPARE

LOOKS = 16
"""In so many batches it is looked whether a data set changes itself."""


class Maker:
    """Makes batches; one for each process."""

    def __init__(self, recipe: Recipe, arena: Arena | None = None, *, watch: bool = False) -> None:
        self.recipe, self.arena = recipe, arena
        self.files = Files(recipe.stamps) if watch else None
        self._names = Names(recipe.stamps)
        self.at: Callable[[Any], None] = lambda index: None
        """Told of each sample before it is made, so that its name outlives this process."""
        self.peers = Peers()
        self.measures = True
        """Whether fetching is told from preparing; that takes a moment for each batch."""
        self._looks = LOOKS if recipe.must_stay_like else 0
        self._has_begun = False

    def hold(self, arena: Arena) -> None:
        """From now on samples are kept there."""
        self.arena, self.files = arena, Files(self.recipe.stamps)

    def watching(self) -> AbstractContextManager[None]:
        """Within, files are seen where samples are kept, and elsewhere their names."""
        return watched(self._names if self.files is None else self.files)

    def make(self, task: Task) -> Made:
        """Never raises: an error is part of what was made."""
        meter = Meter(self.files) if self.measures else NoMeter()
        found, began = Made(key=task.shelved.key), time.perf_counter()
        self._from_memory = self._from_peers = 0
        self.peers.key = task.shelved.key
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
        found.liars = set(self.peers.liars)
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
            return self._together(task)
        found: list[Any] = []
        like = likeness(recipe.dataset) if self._looks and self._has_begun else None
        for index in task.indices:
            self.at(index)
            if recipe.seed is not None:
                draws.seed_sample(recipe.seed, task.epoch, index)
            try:
                found.append(self._sample(index, task, made))
            except Exception as error:
                told = self._blame(f"sample {index}", error)
                if not recipe.skip:
                    raise told from error
                made.bad.append(str(told))
            if self._looks and like is None:  # with the first sample, some open what they need
                like, self._has_begun = likeness(recipe.dataset), True
        if self._looks:
            self._looks -= 1
            made.changes = like != likeness(recipe.dataset)
        if not found:
            raise DataError(
                f"no sample of the batch {_few(task.indices)} could be read: {made.bad[0]}"
            )
        return found

    def _together(self, task: Task) -> Any:
        """What a data set gives for several indices at once, or for what stands for a batch."""
        recipe, asked, self._names.last = self.recipe, task.indices, ""
        self.at(asked)
        try:
            return recipe.dataset.__getitems__(asked) if recipe.collates else recipe.dataset[asked]
        except Exception as error:
            which = f"samples {_few(asked)}" if recipe.collates else f"sample {asked}"
            raise self._blame(which, error) from error

    def _collate(self, data: Any, task: Task) -> Any:
        try:
            return self.recipe.collate(data)
        except Exception as error:
            odd = _odd_one(data, task.indices)
            raise DataError(
                f"samples {_few(task.indices)} could not be put into a batch: "
                f"{odd or f'{type(error).__name__}: {error}'}. Look at the collate function, and "
                "at samples of different shapes"
            ) from error

    def _sample(self, index: Any, task: Task, made: Made) -> Any:
        shelved, (self.files or self._names).last = task.shelved, ""
        held = self._held(shelved.held.get(index))
        if held is not None and shelved.held[index].form == DECODED:
            self._from_memory += 1
            stamps, sample = thaw(held)
            check(stamps)
            return sample
        known = None
        if self.files is not None:
            known = held if held is not None else self._from_peer(index, task, made)
            self._from_memory += held is not None
        if index not in shelved.keep:
            sample = self._read(index, known)
            if known is None and index in shelved.give:
                self._give(index, shelved.give[index], made)
            if known is not None and self.files is not None and self.files.opened:
                made.stale.append(index)
            return sample
        states, before = draws.states(), self.files.read_s if self.files else 0.0
        began = time.perf_counter()
        sample = self._read(index, known)
        took_s = time.perf_counter() - began
        read_s = self.files.read_s - before if self.files else 0.0
        drew = not draws.same(states, draws.states())
        made.draws |= drew
        self._keep((index, sample), shelved.keep[index], made, saves=(read_s, took_s), drew=drew)
        return sample

    def _read(self, index: Any, known: bytes | None) -> Any:
        """A sample, from its encoded bytes where they are known."""
        files, dataset = self.files, self.recipe.dataset
        if files is None:
            self._names.last = ""
            return dataset[index]
        if not self.recipe.in_two_steps:
            files.begin(index, None if known is None else thaw(known))
            return dataset[index]
        files.begin(index)
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
        if index not in task.shelved.away:
            return None
        data = self.peers.get(task.shelved.away[index], index)
        if data == ABSENT:
            made.missed.append(index)
            return None
        self._from_peers += data is not None
        return data

    def _give(self, index: Any, address: Address, made: Made) -> None:
        """To the device that is to hold it."""
        assert self.files is not None
        whole = self.files.whole
        if whole is not None:
            data = freeze(whole)
            made.sizes.append((ENCODED, len(data), 0.0))
            taken = self.peers.put(address, index, data)
            if taken:
                made.given[index] = address.device
            elif taken is not None:
                made.refused.append(address.device)

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

    def _blame(self, which: str, error: Exception) -> DataError:
        name = type(self.recipe.dataset).__name__
        if isinstance(error, DataError):  # it says itself which file, and what to do
            return DataError(f"{which} of {name}: {error}")
        last = (self.files or self._names).last
        file = f" (file {last})" if last else ""
        can_skip = self.recipe.by_sample and not self.recipe.skip
        or_skip = ', or leave such samples out: tz.feed(..., bad="skip")' if can_skip else ""
        return DataError(
            f"{which} of {name}{file} could not be read: {type(error).__name__}: {error}. "
            f"Repair or remove it{or_skip}"
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


def _odd_one(data: Any, indices: Any) -> str:
    """The first sample whose tensors are not shaped as those of most; empty: that is not known."""
    if not isinstance(data, list) or not isinstance(indices, list) or len(data) != len(indices):
        return ""
    shapes = [
        tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(one) if hasattr(leaf, "shape"))
        for one in data
    ]
    usual = Counter(shapes).most_common(1)[0][0]
    for index, found in zip(indices, shapes, strict=True):
        if found != usual:
            return f"sample {index} has {_shapes(found)}, most have {_shapes(usual)}"
    return ""


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes) or "no tensors"


def _few(indices: Sequence[Any]) -> str:
    shown = ", ".join(str(index) for index in list(indices)[:8])
    return f"[{shown}, ...]" if len(indices) > 8 else f"[{shown}]"

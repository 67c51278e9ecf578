"""Stream: an iterable data set that came without a loader, read ahead by one process where it pays.

Only its own iterator knows the order, and that cannot be moved to another process in the middle:
so a change waits for the next epoch. The worker tells of each batch whether the loop would have had
the same: nothing was drawn from generators that the loop has, and the data set is what it was. From
the first batch on of which that is not so, or that does not come, the loop reads by itself, after
passing over what it has had: order and numbers are those of the loop, always.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from terrazzo.feed import draws
from terrazzo.feed.arbiter import Memory, room_bytes
from terrazzo.feed.files import Names, watched
from terrazzo.feed.likeness import likeness
from terrazzo.feed.pool import LEAST_WORKER_BYTES
from terrazzo.feed.process import CAN_FORK
from terrazzo.feed.seeded import AHEAD
from terrazzo.feed.stamps import Stamps
from terrazzo.feed.stays import copies_reason
from terrazzo.feed.stock import ANY_BYTES
from terrazzo.feed.tally import say
from terrazzo.feed.tuner import Change, Limits, Settings, Tuner

LONG_S, LONG = 20.0, 20
"""A worker is given up if it takes longer than that, and so many times as long as any batch."""
END = "end"
Told = tuple[Any, str]
"""A batch, and why the loop would not have had it; at the end there is none."""


class Stream:
    """One data set for all its epochs."""

    def __init__(
        self, loader: DataLoader[Any], *, ahead: int | None, stamps: Stamps | None
    ) -> None:
        self.loader, self.stamps = loader, stamps
        self.tuner = Tuner(Settings(), Limits(1, ahead or AHEAD))
        self.reason = ""
        """Why it stays in the loop; empty: it need not."""
        self.longest_s = 0.0
        self._batch_bytes = 0

    def epoch(
        self,
        read: Callable[[Iterable[Any]], Iterator[Any]],
        tell: Callable[[Change, Tuner], None],
    ) -> Iterator[Any]:
        """One way through it; ``read`` takes batches and writes down how long they took."""
        is_ahead = self._may_be_ahead()
        batches = read(Ahead(self) if is_ahead else self.loader)
        left = time.perf_counter()
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            end = time.perf_counter()
            if not is_ahead:
                self.longest_s = max(self.longest_s, end - begin)
            if not self._batch_bytes:
                tensors = [one for one in pytree.tree_leaves(batch) if hasattr(one, "nbytes")]
                self._batch_bytes = sum(one.nbytes for one in tensors)
            yield batch
            del batch
            now = time.perf_counter()
            if is_ahead == bool(self.tuner.settings.workers) and not self.reason:
                change = self.tuner.step(
                    wait_s=end - begin, train_s=(begin - left) + (now - end), make_s=end - begin
                )
                if change is not None:
                    tell(change, self.tuner)
            left = now

    def _may_be_ahead(self) -> bool:
        """Whether this epoch is read ahead: the tuner wants it, and nothing speaks against it."""
        if self.reason or not self.tuner.settings.workers:
            return False
        dataset = self.loader.dataset
        if not CAN_FORK:
            self.reason = "this system cannot fork processes that end with it"
        elif isinstance(dataset, IterDataPipe):
            self.reason = "a data pipe is seeded by its loader"
        else:
            self.reason = copies_reason((dataset, self.loader.collate_fn))
        needed = LEAST_WORKER_BYTES + (self.tuner.limits.ahead + 1) * self._batch_bytes
        free = room_bytes(Memory.here(), held_bytes=0, asked_bytes=ANY_BYTES)
        if not self.reason and free < needed:
            return False
        if self.reason:
            self.give_up(self.reason)
        return not self.reason

    def give_up(self, reason: str) -> None:
        self.reason = reason
        say(f"batches are made in the training process: {reason}")


class Ahead:
    """An epoch that a worker reads ahead."""

    num_workers = 1

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        stream, loader, position = self.stream, self.stream.loader, 0
        own = loader.generator
        assert own is not None
        before, told = own.get_state(), self._begun()
        while True:
            batch, why = _next(told)
            if why:
                break
            yield batch
            position += 1
            del batch
        del told
        if why == END:
            return
        stream.give_up(why)
        own.set_state(before)
        yield from islice(iter(loader), position, None)

    def _begun(self) -> Iterator[Told]:
        """It draws from the loader's generator what an epoch in the loop draws: one number."""
        stream = self.stream
        patience_s = max(LONG_S, LONG * stream.longest_s)
        loader = DataLoader(
            Watched(stream.loader, stream.stamps), batch_size=None, collate_fn=_as_it_is,
            generator=stream.loader.generator, num_workers=1, multiprocessing_context="fork",
            prefetch_factor=stream.tuner.limits.ahead, timeout=patience_s,
        )  # fmt: skip
        found: Any = iter(loader)
        if found._worker_pids_set:
            # Its death would be raised wherever the script is then; here it is waited for in vain.
            _remove_worker_pids(id(found))
            found._worker_pids_set = False
        yield from found


class Watched(IterableDataset[Told]):
    """In the worker: the batches of a loader, each with what the loop must know of it."""

    def __init__(self, loader: DataLoader[Any], stamps: Stamps | None) -> None:
        self.loader, self.stamps = loader, stamps

    def __iter__(self) -> Iterator[Told]:
        torch_worker._worker_info = None  # a data set may ask, and is to hear what the loop hears
        dataset, names, batches = self.loader.dataset, Names(self.stamps), None
        like, done, is_over = likeness(dataset), object(), False
        while not is_over:
            before = draws.states()
            with watched(names):
                batches = iter(self.loader) if batches is None else batches
                batch = next(batches, done)
            is_over, why = batch is done, ""
            if not draws.same(before, draws.states()):
                why = "samples draw random numbers there, one after the other"
            elif likeness(dataset) != like:
                why = "the data set changes itself as it is read"
            yield (None if is_over else batch), why or (END if is_over else "")
            is_over = is_over or bool(why)


def _next(told: Iterator[Told]) -> Told:
    """What fails in a worker that nobody asked for may still go well in the loop."""
    try:
        return next(told)
    except Exception as error:
        text = str(error).strip().splitlines()
        return None, f"a worker could not read on: {text[-1] if text else type(error).__name__}"


def _as_it_is(told: Any) -> Any:
    return told

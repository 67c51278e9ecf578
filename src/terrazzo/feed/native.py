"""Native: batches as a loader or any iterable gives them, with what was waited for written down.

Where they are made in this very process, clocks tell fetching from preparing, as in ``maker``. What
a loader's own workers do is not seen, and only the waiting is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.feed.files import Names, watched
from terrazzo.feed.meter import Meter, NoMeter
from terrazzo.feed.stages import Clock, Took
from terrazzo.feed.stamps import Stamps
from terrazzo.records.stage import FETCH, PREPARE, WAIT

Blame = Callable[[int, str, Exception], Exception]
"""From the number of a batch, the file that was opened last and what was raised, to an error."""


def native(
    loader: Iterable[Any],
    clock: Clock,
    *,
    epoch: int,
    blame: Blame | None = None,
    stamps: Stamps | None = None,
) -> Iterator[Any]:
    """One way through it; without ``blame`` errors are left as they are."""
    batches: Iterator[Any] | None = None
    names, number, done = Names(stamps), 0, object()
    is_seen = clock.recorder is not None and not getattr(loader, "num_workers", 0)
    while True:
        begin, names.last = time.perf_counter(), ""
        meter = Meter(None) if is_seen else NoMeter()
        try:
            with watched(names):
                batches = iter(loader) if batches is None else batches
                batch = next(batches, done)
        except Exception as error:
            if blame is None:
                raise
            raise blame(number, names.last, error) from error
        if batch is done:
            return
        meter.stop()
        end = time.perf_counter()
        if is_seen:
            fetch_s, count = min(meter.fetch_s, end - begin), rows_of(batch)
            for took in (
                Took(FETCH, begin, end, fetch_s, meter.read_bytes, count),
                Took(PREPARE, begin, end, end - begin - fetch_s, 0, count),
            ):
                clock.note(took, epoch=epoch, batch=number, beside=True)
        clock.note(Took(WAIT, begin, end, end - begin), epoch=epoch, batch=number, beside=False)
        yield batch
        number += 1


def rows_of(batch: Any) -> int:
    """Samples of a batch, by its first tensor."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return int(tensors[0].shape[0]) if tensors and tensors[0].ndim else len(tensors[:1])

"""Sources: what tz.feed can read from, and the one that a net has for each loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from terrazzo.errors import DataError, UsageError
from terrazzo.feed.chance import draw_as, drawn_from
from terrazzo.feed.choice import EACH, MEASURED, READER
from terrazzo.feed.native import native
from terrazzo.feed.parts import part_of
from terrazzo.feed.rehearsal import Rehearsal
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.sharing import Offer, Offers
from terrazzo.feed.source import Options, Source
from terrazzo.feed.stages import Clock
from terrazzo.feed.stock import Stock
from terrazzo.records.units import parse_bytes
from terrazzo.runtime.net import Net
from terrazzo.runtime.recorder import Recorder

BAD = ("raise", "skip")
READING = (MEASURED, READER, EACH)
MOST_LOADERS = 4
"""So many loaders of a net are known at once: a source has workers and memory."""


class Plain:
    """Any iterable: taken as it is."""

    def __init__(self, loader: Iterable[Any], recorder: Callable[[], Recorder | None]) -> None:
        self.loader, self.recorder, self.epoch = loader, recorder, 0

    def chance(self) -> dict[str, Any]:
        return {**drawn_from(self.loader), "epoch": self.epoch}

    def draw_as(self, told: dict[str, Any]) -> None:
        draw_as(told, self.loader)
        self.epoch = told.get("epoch", self.epoch)

    def begin(self, position: int) -> Iterator[Any]:
        """An epoch from there on; what comes before is read, for all that reading changes."""
        return islice(self, position, None)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return native(self.loader, Clock(self.recorder()), epoch=self.epoch - 1)


def source_of(
    loader: Any,
    net: Net,
    *,
    workers: int | None = None,
    ahead: int | None = None,
    cache: str | int | None = None,
    bad: str = "raise",
    batch_size: int | None = None,
    shuffle: bool = True,
    sampler: Iterable[Any] | None = None,
    collate: Callable[[Any], Any] | None = None,
    drop_last: bool = False,
    seed: int | None = None,
    mine: Iterable[int] | None = None,
    reading: str = MEASURED,
) -> Source | Plain:
    """The source of a loader or a data set, the same one for all its epochs.

    With other options it is another source, with epochs of its own: of one data set, tests take
    other batches than training does.

    ``workers``, ``ahead`` (batches) and ``cache`` ("200MiB", bytes; 0: none) fix what is otherwise
    tuned. ``bad="skip"`` leaves samples out that cannot be read, and counts them. The others are
    for a data set that comes without a loader: how it is batched and in which order, by ``seed``
    (default: that of net); ``mine``, which of its samples this device has, where it is not all; and
    ``reading``: one device for all ("reader"), each for itself ("each"), or what is faster.
    """
    if reading not in READING:
        raise UsageError(f"reading={reading!r}: say one of {', '.join(READING)}")
    if bad not in BAD:
        raise UsageError(f"bad={bad!r}: say one of {', '.join(BAD)}")
    known = net.__dict__.setdefault("_sources", {})
    asked = (id(loader), workers, ahead, cache, bad, batch_size, shuffle, drop_last, seed)
    found = known.get(asked)
    if found is not None and found[0]() is loader:
        source: Source | Plain = found[1]
        known[asked] = known.pop(asked)  # the one that was used last
        if found[2] is not sampler or not _is_like(found[3], collate):
            raise UsageError(
                f"tz.feed got another sampler or collate function for the same "
                f"{type(loader).__name__} before: make them once, before the first epoch"
            )
        return _parted(source, mine, reading)

    def recorder() -> Recorder | None:
        return net.links.recorder

    trial: Rehearsal | None = net.links.rehearsal
    if mine is not None and (trial is not None or isinstance(loader, DataLoader)):
        raise UsageError(
            "mine= is for a data set without a loader, and not for a trial of one device: "
            "tz.feed(dataset, net, batch_size=8, mine=indices)"
        )
    if not isinstance(loader, (DataLoader, Dataset)) and not (batch_size and _is_map(loader)):
        if any(one is not None for one in (batch_size, sampler, collate, mine)):
            raise UsageError(
                f"tz.feed takes {type(loader).__name__} for batches, and batch_size, sampler, mine "
                "and collate are for a data set: something with a length and numbered samples, or "
                "an IterableDataset of torch.utils.data"
            )
        return Plain(loader if trial is None else trial.loader(loader), recorder)
    own: int | None = None
    reads: DataLoader[Any]
    if isinstance(loader, DataLoader):
        _refuse(loader, batch_size, sampler, collate)
        reads = loader
    else:
        own = net.seed if seed is None else seed
        reads = seeded_loader(
            loader, seed=own, batch_size=batch_size, shuffle=shuffle, sampler=sampler,
            collate=collate, drop_last=drop_last, workers=workers, ahead=ahead,
        )  # fmt: skip
    options = Options(
        workers=workers,
        ahead=ahead,
        cache_bytes=None if cache is None else _bytes_of(cache),
        skip=bad == "skip",
        seed=own,
    )
    if trial is not None:
        arranged = trial.loader(reads, is_made=own is not None)
        if not isinstance(arranged, DataLoader):
            return Plain(arranged, recorder)
        if arranged is not reads:
            reads, options = arranged, replace(options, workers=0, cache_bytes=0)
    is_shared = options.cache_bytes and net.links.devices > 1 and mine is None
    offers = Offers(net) if is_shared else None
    source = Source(
        reads, options, recorder=recorder, trains=lambda: net.training, offers=offers,
        stock=net.__dict__.setdefault("_stock", Stock()),
    )  # fmt: skip
    for _, other, *_ in known.values():
        if isinstance(other, Source) and other.loader.dataset is reads.dataset:
            other.rest()
    known[asked] = (_reference(loader), source, sampler, collate)
    loaders = [key for key, row in known.items() if isinstance(row[0](), DataLoader)]
    for key in loaders[:-MOST_LOADERS]:  # of a script that makes one for each epoch
        del known[key]
    return _parted(source, mine, reading)


def _parted(source: Source | Plain, mine: Iterable[int] | None, reading: str) -> Source | Plain:
    """With what this device has of the data, which a script may say anew for each epoch."""
    if isinstance(source, Source):
        source.reading = reading
        source.mine = None if mine is None else part_of(mine, source)
    return source


def all_of(source: Source | Plain) -> Source | Plain:
    """The source of a device that is alone, which must have all samples."""
    if isinstance(source, Source) and source.mine is not None and not source.mine.all():
        raise DataError(
            f"{int((~source.mine).sum())} of {len(source.mine)} samples are not in mine=, and "
            "there is no other device to have them"
        )
    return source


def offer_of(net: Net, cache: str | int | None) -> Offer:
    """What a device that does not read holds for the one that does, if any feed asks it to."""
    found: Offer = net.__dict__.setdefault("_offer", Offer(net))
    found.ask(0 if cache is None else _bytes_of(cache))
    return found


def _bytes_of(cache: str | int) -> int:
    """Of ``cache=``; none may come as text, from a command line."""
    return 0 if cache in (0, "0") else parse_bytes(cache)


def _is_map(data: Any) -> bool:
    """Whether it has what a map-style data set has, whatever it inherits from."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _reference(data: Any) -> Callable[[], Any]:
    """To something that may go; a list, say, stays."""
    try:
        return weakref.ref(data)
    except TypeError:
        return lambda: data


def _is_like(one: Any, other: Any) -> bool:
    """Whether a function is the same one, or was written in the same place and encloses nothing."""
    if one is other:
        return True
    code: Any = getattr(one, "__code__", None)
    if code is None or code.co_freevars:
        return False
    return code is getattr(other, "__code__", None)


def _refuse(loader: DataLoader[Any], *given: Any) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, so every device would train on other samples. "
            "tz.feed reads on one device and spreads each batch: use a plain sampler."
        )
    if any(one is not None for one in given):
        raise UsageError(
            "tz.feed got a loader, which has its own batch_size, sampler and collate function: "
            "give those to the loader, or give the data set instead of it"
        )

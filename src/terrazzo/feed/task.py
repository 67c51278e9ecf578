"""Task: what is to be made of some samples, what was made of them, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Subset

from terrazzo.feed import draws
from terrazzo.feed.pantry import Address
from terrazzo.feed.stages import Took
from terrazzo.feed.stamps import Stamps
from terrazzo.feed.twosteps import is_in_two_steps


class Place(NamedTuple):
    """Where a sample lies in the arena, and in which form."""

    place: int
    size: int
    form: str


@dataclass
class Shelved:
    """What is known of the samples of a batch."""

    held: dict[Any, Place] = field(default_factory=dict)
    """Samples that are in memory."""
    keep: dict[Any, str] = field(default_factory=dict)
    """Samples that are to be put there, and the form in which."""
    away: dict[Any, Address] = field(default_factory=dict)
    """Samples that another device holds."""
    give: dict[Any, Address] = field(default_factory=dict)
    """Samples that another device is to hold, once they are read."""
    key: bytes = b""
    """Of the marks on what other devices hold."""


@dataclass(frozen=True)
class Task:
    """What is to be made."""

    indices: Any
    """As the sampler gave them: a list, or one index where batches are not collated."""
    stream: draws.Stream | None = None
    states: draws.States | None = None
    """How its worker of the loader begins this batch; None: as it began the epoch."""
    epoch: int = 0
    shelved: Shelved = field(default_factory=Shelved)


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
    refused: list[int] = field(default_factory=list)
    """Devices that had no room, once for each time."""
    missed: list[Any] = field(default_factory=list)
    """Samples that another device was to have, and does not have."""
    stale: list[Any] = field(default_factory=list)
    """Samples that were held, and were read from other files all the same."""
    liars: set[int] = field(default_factory=set)
    """Devices that gave something else than they had been given."""
    key: bytes = b""
    """Under which it was held; another one since then: it counts no more."""
    sizes: list[tuple[str, int, float]] = field(default_factory=list)
    """Forms of samples, their bytes, and the seconds that holding one in that form would save."""
    draws: bool = False
    """Whether a sample that was to be kept drew random numbers, so that it is no constant."""
    changes: bool = False
    """Whether the data set was another one afterwards."""
    bad: list[str] = field(default_factory=list)
    """Samples that were left out, and why."""
    error: BaseException | None = None
    trace: str = ""
    """Where it happened, if that was in a worker."""


@dataclass
class Recipe:
    """How batches are made: what is the same for all of them."""

    dataset: Any
    collate: Callable[[Any], Any]
    collates: bool = True
    """Whether indices come as lists (``batch_size`` of the loader is not None)."""
    skip: bool = False
    """Whether bad samples are left out."""
    seed: int | None = None
    """Samples have their own seeds, made of this one; None: they draw as under a DataLoader."""

    stamps: Stamps | None = None
    """What its files were when they were first read; None: they may change as they like."""

    is_copied: bool = True
    """Whether workers are not the script's own idea, so that the data set must not count on being
    the only one of its kind."""

    @property
    def must_stay_like(self) -> bool:
        """Whether it is looked at if reading samples changes the data set."""
        return self.is_copied and self.by_sample and not self.in_two_steps

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

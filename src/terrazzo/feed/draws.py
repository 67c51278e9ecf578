"""Draws: the random numbers that making a sample takes from generators all code shares.

A DataLoader seeds the generators of its worker ``v`` once, and batch ``p`` of an epoch is made by
worker ``p % count``: a sample that draws depends on all before it in the same worker. Such a row is
a stream here. It can be made in any process as long as its states are carried from batch to batch.
A data set that was given without a loader has a seed for each sample instead, and no such chains.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

SPAN = float(1 << 63)
"""What ``mix`` gives is below that."""
States = tuple[Any, Any, Any]
"""Of torch, Python and NumPy."""
TORCH, PYTHON, NUMPY = "torch", "python", "numpy"


class Stream(NamedTuple):
    """Where the draws of one worker of a DataLoader begin."""

    base: int
    number: int
    workers: int

    @property
    def seed(self) -> int:
        return self.base + self.number


def states() -> States:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(found: States) -> None:
    torch.set_rng_state(found[0])
    random.setstate(found[1])
    np.random.set_state(found[2])


def same(a: States, b: States) -> bool:
    return not _apart(a, b)


def moved(before: States) -> set[str]:
    """Which generators have been drawn from since."""
    return _apart(before, states())


def _apart(a: States, b: States) -> set[str]:
    alike = {
        TORCH: torch.equal(a[0], b[0]),
        PYTHON: a[1] == b[1],
        NUMPY: a[2][2:] == b[2][2:] and np.array_equal(a[2][1], b[2][1]),
    }
    return {name for name, is_same in alike.items() if not is_same}


def begin(stream: Stream) -> None:
    """Seeds all generators as a DataLoader seeds those of a worker."""
    random.seed(stream.seed)
    torch.default_generator.manual_seed(stream.seed)
    np.random.seed(_generate_state(stream.base, stream.number))  # type: ignore[no-untyped-call]


def word_of(index: Any) -> int:
    """A number for whatever names a sample: samplers may give numbers of NumPy, or text."""
    return index.__index__() if hasattr(index, "__index__") else mix(*str(index).encode())


def seed_sample(seed: int, epoch: int, index: Any) -> None:
    """The same draws for a sample of an epoch, whoever makes it."""
    mixed = mix(seed, epoch, word_of(index))
    random.seed(mixed)
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def mix(*words: int) -> int:
    """63 bits that depend on all the words: rounds of splitmix64."""
    found = 0
    for word in words:
        found = (found + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        found = ((found ^ (found >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        found = ((found ^ (found >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        found ^= found >> 31
    return found >> 1

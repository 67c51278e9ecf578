"""Likeness: whether an object is still what it was, by a short walk through it.

Workers have a copy of the data set from when they were started. A script may change its own
(another size of pictures, another transform), and they must follow. Looking at all of it before
each batch would cost too much: the walk is bounded, sees every plain attribute down to some depth,
and of long lists and arrays the length and a few entries. Tensors count their own changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

MOST_OBJECTS = 200
MOST_ENTRIES = 16
DEPTH = 6
PLAIN = (int, float, complex, bool, str, bytes, type(None), PurePath)
"""What never changes. A path notes its own text when it is first used: that is no change of it."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
TENSORS, ARRAYS = (torch.Tensor,), (np.ndarray,)
FIXED = (ModuleType, type)
MANY = (list, tuple, set, frozenset, dict)
OTHERS = (object,)
CLOSED = (GENERATORS, TENSORS, ARRAYS, FIXED)
"""The walk goes no further into them."""


def likeness(root: Any) -> int:
    """A number that changes when the object is changed, as far as the walk sees."""
    return hash(tuple(_walk(root)))


def _walk(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(root, 0)]
    while todo and len(seen) < MOST_OBJECTS:
        one, depth = todo.pop()
        kind = _kind_of(one.__class__)
        if kind is PLAIN:
            yield one
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield id(one)
        yield from _marks(one, kind)
        is_long = isinstance(one, dict) and len(one) > MOST_ENTRIES
        if depth < DEPTH and kind not in CLOSED and not is_long:
            todo += [(part, depth + 1) for part in entries(one, MOST_ENTRIES)]


@lru_cache(maxsize=1024)
def _kind_of(exact: type) -> tuple[type, ...]:
    """Asked for every object before every batch, and too slow to be asked anew."""
    kinds: list[tuple[type, ...]] = [PLAIN, GENERATORS, TENSORS, ARRAYS, FIXED, MANY]
    return next((kind for kind in kinds if issubclass(exact, kind)), OTHERS)


@lru_cache(maxsize=1024)
def _slots(exact: type) -> tuple[str, ...]:
    found: list[str] = []
    for kind in exact.__mro__:
        names = kind.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple(found)


def _marks(one: Any, kind: tuple[type, ...]) -> Iterator[Any]:
    if kind is GENERATORS:
        yield "generator"
    elif kind is TENSORS:
        # Of tensors that were made in inference mode nobody counts the changes.
        yield from (0 if one.is_inference() else one._version, tuple(one.shape))
    elif kind is ARRAYS:
        yield from (one.shape, one.ctypes.data)
        if one.size and one.dtype != object:
            picked = one.reshape(-1)[:: max(one.size // MOST_ENTRIES, 1)]
            yield picked[:MOST_ENTRIES].tobytes()
    elif kind is MANY:
        yield len(one)


def entries(one: Any, most: int) -> list[Any]:
    """What an object is made of; of long ones, some."""
    if isinstance(one, dict):
        pairs = list(islice(one.items(), most))
        return [part for pair in pairs for part in pair]
    if isinstance(one, (list, tuple)):
        return list(one[:: max(len(one) // most, 1)])[:most]
    if isinstance(one, (set, frozenset)):
        return list(islice(one, most))
    if isinstance(one, FunctionType):
        cells = one.__closure__ or ()
        return [cell.cell_contents for cell in cells if cell != type(cell)()]
    found = [getattr(one, "__self__", None)]
    state = getattr(one, "__dict__", None)
    if isinstance(state, dict):
        found += list(state.values())
    found += [getattr(one, name, None) for name in _slots(one.__class__)]
    return found

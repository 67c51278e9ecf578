"""Likeness: whether an object is still what it was, by a short walk through it.

Workers have a copy of the data set from when they were started. A script may change its own
(another size of pictures, another transform), and they must follow. Looking at all of it before
each batch would cost too much: the walk is bounded, sees every plain attribute down to some depth,
and of long lists and arrays the length and a few entries. Tensors count their own changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

MOST_OBJECTS = 200
MOST_ENTRIES = 16
DEPTH = 6
PLAIN = (int, float, complex, bool, str, bytes, type(None))
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def likeness(root: Any) -> int:
    """A number that changes when the object is changed, as far as the walk sees."""
    return hash(tuple(_walk(root)))


def _walk(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(root, 0)]
    while todo and len(seen) < MOST_OBJECTS:
        one, depth = todo.pop()
        if isinstance(one, PLAIN):
            yield one
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield id(one)
        yield from _marks(one)
        if depth < DEPTH:
            todo += [(part, depth + 1) for part in _parts(one)]


def _marks(one: Any) -> Iterator[Any]:
    if isinstance(one, GENERATORS):
        yield "generator"
    elif isinstance(one, torch.Tensor):
        # Of tensors that were made in inference mode nobody counts the changes.
        yield from (0 if one.is_inference() else one._version, tuple(one.shape))
    elif isinstance(one, np.ndarray):
        yield from (one.shape, one.ctypes.data)
        if one.size and one.dtype != object:
            picked = one.reshape(-1)[:: max(one.size // MOST_ENTRIES, 1)]
            yield picked[:MOST_ENTRIES].tobytes()
    elif isinstance(one, (list, tuple, set, frozenset, dict)):
        yield len(one)


def _parts(one: Any) -> list[Any]:
    if isinstance(one, (ModuleType, type, torch.Tensor, np.ndarray, *GENERATORS)):
        return []
    if isinstance(one, dict) and len(one) > MOST_ENTRIES:
        return []
    return entries(one, MOST_ENTRIES)


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
    for kind in type(one).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            found.append(getattr(one, name, None))
    return found

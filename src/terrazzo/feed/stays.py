"""Stays: why the batches of a loader are left to the loader, or to the training process.

Workers have copies. Whatever has a state that copies do not share (a generator of its own) or share
too well (an open file has one place for all who inherit it) would give other samples there, so it
stays where the loader has it. Not everything can be seen: the search goes through attributes, what
functions enclose, and the globals that they and the methods of a data set name.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterator
from struct import Struct
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from terrazzo.feed.likeness import GENERATORS, entries
from terrazzo.feed.order import sight
from terrazzo.feed.process import CAN_FORK

OWN_WAYS = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
WITH_WORKERS = ("worker_init_fn", "multiprocessing_context", "timeout", "persistent_workers")
MOST_OBJECTS = 4000
MOST_ENTRIES = 64
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "PIL"}
"""Whose functions draw from the generators that all code shares, if they draw."""

NEVER_OPEN = (
    type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, MappingProxyType, property,
    weakref.ref, memoryview, Struct, torch.Tensor, np.ndarray,
)  # fmt: skip


def goes_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether only the loader itself knows its batches."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    return any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in OWN_WAYS)


def stays_reason(loader: DataLoader[Any]) -> str:
    """Why its batches cannot be made elsewhere without changing them; empty: they can."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            "the data set is iterable, and its order is its own. To have it read ahead give its "
            "loader num_workers=1, or give the data set itself: tz.feed(dataset, net, batch_size=8)"
        )
    if goes_its_own_way(loader):
        return f"{type(loader).__name__} has a way of its own"
    if not CAN_FORK:
        return "this system cannot fork processes that end with it"
    for name in WITH_WORKERS:
        if getattr(loader, name, None):
            return f"the loader has {name}"
    if not getattr(loader, "in_order", True):
        return "the loader has in_order=False"
    if not loader.num_workers and not sight(loader):
        return f"{type(loader.sampler).__name__} may depend on when it is asked"
    return copies_reason((loader.dataset, loader.collate_fn), asked=loader.num_workers > 0)


def copies_reason(root: Any, *, asked: bool = False) -> str:
    """Why copies of it in other processes would not do the same; empty: nothing was found.

    ``asked``: the script itself wants workers, and takes open files to them.
    """
    shared = {id(one) for one in _shared_generators()}
    for one in _reached(root):
        if isinstance(one, GENERATORS) and id(one) not in shared:
            return "the data set has a random generator of its own"
        if not asked and _is_open(one):
            return f"the data set holds something open ({type(one).__name__})"
    return ""


def _shared_generators() -> list[Any]:
    """Their states are carried to whoever makes a batch."""
    return [torch.default_generator, random.random.__self__, np.random.random.__self__]  # type: ignore[attr-defined]


def _reached(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    todo = [root]
    while todo and len(seen) < MOST_OBJECTS:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (int, float, complex, str, bytes, type(None))):
            continue
        seen.add(id(one))
        yield one
        todo += _next(one)


def _next(one: Any) -> list[Any]:
    if isinstance(one, (ModuleType, torch.Tensor, np.ndarray, *GENERATORS)):
        return []
    if isinstance(one, FunctionType):
        return [*entries(one, MOST_ENTRIES), *_named(one)]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, type):
        return [] if _is_library(one) else _methods(one)
    return [*entries(one, MOST_ENTRIES), type(one)]


def _methods(kind: type) -> list[Any]:
    found: list[Any] = [base for base in kind.__bases__ if base is not object]
    for value in vars(kind).values():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, (FunctionType, *GENERATORS)):
            found.append(value)
    return found


def _named(function: FunctionType) -> list[Any]:
    """Globals that a function names, also as attributes of modules."""
    if _is_library(function):
        return []
    names = set(_names(function.__code__))
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [one for one in found if isinstance(one, ModuleType)]
    inside = [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return found + [one for one in inside if isinstance(one, (FunctionType, *GENERATORS))]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_library(one: Any) -> bool:
    return _root(one) in LIBRARIES


def _root(one: Any) -> str:
    return str(getattr(one, "__module__", None) or "").partition(".")[0]


def _is_open(one: Any) -> bool:
    """Files, connections and whatever else cannot be copied because of what it is in the middle of.

    Such things refuse to be pickled. Asked are only those that have no say of their own in it.
    """
    if isinstance(one, NEVER_OPEN) or _root(type(one)) in ("torch", "_thread", "threading"):
        return False
    if hasattr(one, "fileno"):
        try:
            return isinstance(one.fileno(), int)
        except Exception:  # closed, or nothing that the system knows of
            return False
    ways = ("__getstate__", "__reduce__", "__reduce_ex__")
    if any(isinstance(getattr(type(one), way, None), FunctionType) for way in ways):
        return False
    try:
        one.__reduce_ex__(2)
    except Exception:
        return True
    return False

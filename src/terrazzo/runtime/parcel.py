"""Parcel: nested dictionaries with tensors in them as plain data and a list of tensors, and back.

What comes from the network is JSON and numbers; nothing in it can run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from terrazzo.errors import UsageError

PLAIN = (bool, int, float, str, type(None))


def pack(value: Any, tensors: list[Tensor], *, name: str) -> Any:
    """Plain data that stands for a value; its tensors are added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        kind = "count" if isinstance(value, Counter) else "dict"
        rows = [
            [pack(key, tensors, name=name), pack(part, tensors, name=f"{name}.{key}")]
            for key, part in value.items()
        ]
        return {kind: rows}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(part, tensors, name=name) for part in value]}
    raise UsageError(
        f"the state of {name} holds a {type(value).__name__}, which cannot be saved, nor sent to a "
        "device that joins: only numbers, texts, tensors, lists and dictionaries can"
    )


def unpack(data: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that plain data stands for."""
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    if kind == "tensor":
        return tensors[body]
    if kind in ("list", "tuple"):
        parts = [unpack(part, tensors) for part in body]
        return parts if kind == "list" else tuple(parts)
    rows = [(unpack(key, tensors), unpack(part, tensors)) for key, part in body]
    return Counter(dict(rows)) if kind == "count" else OrderedDict(rows)


def copied(value: Any, *, name: str) -> Any:
    """The same value, its tensors in memory of their own."""
    tensors: list[Tensor] = []
    data = pack(value, tensors, name=name)
    return unpack(data, [tensor.detach().clone() for tensor in tensors])

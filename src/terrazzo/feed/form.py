"""Form: a sample or a batch as bytes, and back, with one copy each way.

count of parts, their sizes | a pickle without the tensors | tensor | tensor | ...
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from terrazzo.feed.shelf import Shelf

ENCODED, DECODED = "encoded", "decoded"
"""Forms of a sample: as it is stored, or as it is after decoding."""
WORD_BYTES = 8

Parts = list[Any]
"""Pieces of memory that follow each other."""


class _Pickler(pickle.Pickler):
    """Tensors' own way into a pickle is slow; most are just bytes, and lie beside it."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.requires_grad:
            return None
        if obj.device.type != "cpu" or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, tensors: list[memoryview], shelf: Shelf | None = None
    ) -> None:
        super().__init__(stream)
        self._tensors, self._shelf = tensors, shelf

    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape = pid
        data = self._tensors[number]
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        # Copied as bytes into memory of its own, wherever it lay before.
        if self._shelf is None:
            own = torch.empty(len(data), dtype=torch.uint8)
        else:
            own = self._shelf.take(len(data))
        own.numpy()[:] = data
        return own.view(dtype).reshape(shape)


def parts_of(sample: Any) -> Parts:
    """What the bytes of a sample are put together from; raises what pickle raises."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(sample)
    parts = [stream.getbuffer(), *(_bytes_of(tensor) for tensor in pickler.tensors)]
    sizes = [len(parts), *(len(part) for part in parts)]
    return [b"".join(size.to_bytes(WORD_BYTES, "little") for size in sizes), *parts]


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def freeze(sample: Any) -> bytes:
    return b"".join(parts_of(sample))


def thaw(data: bytes | memoryview, shelf: Shelf | None = None) -> Any:
    """The sample again, in memory of its own, or of a shelf."""
    view = memoryview(data)

    def word(number: int) -> int:
        return int.from_bytes(view[WORD_BYTES * number : WORD_BYTES * (number + 1)], "little")

    count = word(0)
    at, parts = WORD_BYTES * (count + 1), []
    for number in range(count):
        parts.append(view[at : at + word(number + 1)])
        at += word(number + 1)
    return _Unpickler(io.BytesIO(parts[0]), parts[1:], shelf).load()

"""Form: a sample or a batch as bytes, and back, with one copy each way, or none on the way back.

count of parts, their sizes | a pickle without the tensors | tensor | tensor | ...

Each part begins at a multiple of 64 bytes, as torch's own memory does: what is computed with a
tensor that lies there is the same to the bit, on any processor.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ENCODED, DECODED = "encoded", "decoded"
"""Forms of a sample: as it is stored, or as it is after decoding."""
WORD_BYTES = 8
ALIGNED_BYTES = 64

Bytes = npt.NDArray[np.uint8]
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
    def __init__(self, stream: io.BytesIO, tensors: list[Bytes], *, is_lent: bool) -> None:
        super().__init__(stream)
        self._tensors, self._is_lent = tensors, is_lent

    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape = pid
        data = self._tensors[number]
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        if self._is_lent:
            own = torch.from_numpy(data)
        else:
            own = torch.empty(len(data), dtype=torch.uint8)
            own.numpy()[:] = data
        return own.view(dtype).reshape(shape)


def parts_of(sample: Any) -> Parts:
    """What the bytes of a sample are put together from; raises what pickle raises."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(sample)
    parts = [stream.getbuffer(), *(_bytes_of(tensor) for tensor in pickler.tensors)]
    sizes = [len(parts), *(len(part) for part in parts)]
    head = b"".join(size.to_bytes(WORD_BYTES, "little") for size in sizes)
    return [piece for part in [head, *parts] for piece in (part, bytes(-len(part) % ALIGNED_BYTES))]


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def freeze(sample: Any) -> bytes:
    return b"".join(parts_of(sample))


def thaw(data: bytes | memoryview) -> Any:
    """The sample again, in memory of its own."""
    return _put_together(np.frombuffer(data, np.uint8), is_lent=False)


def thaw_there(data: Bytes) -> Any:
    """The sample again, whose tensors lie where the data lies and keep that alive."""
    return _put_together(data, is_lent=True)


def _put_together(data: Bytes, *, is_lent: bool) -> Any:
    count = int.from_bytes(data[:WORD_BYTES], "little")
    words = data[WORD_BYTES : WORD_BYTES * (count + 1)].view("<u8").tolist()
    at, parts = WORD_BYTES * (count + 1), []
    for size in words:
        at += -at % ALIGNED_BYTES
        parts.append(data[at : at + size])
        at += size
    return _Unpickler(io.BytesIO(parts[0].data), parts[1:], is_lent=is_lent).load()

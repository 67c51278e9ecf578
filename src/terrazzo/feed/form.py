"""Form: a sample as bytes, either as it is stored or as it is after decoding."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

ENCODED, DECODED = "encoded", "decoded"
WORD_BYTES = 8


class _Pickler(pickle.Pickler):
    """Tensors' own way into a pickle is slow; most are just bytes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.requires_grad or obj.layout is not torch.strided:
            return NotImplemented
        try:
            array: Any = obj.contiguous().numpy()
        except (TypeError, RuntimeError):  # on an accelerator, or of a type NumPy has not
            return NotImplemented
        return _rebuild, (obj.dtype, tuple(obj.shape), pickle.PickleBuffer(array))


def _rebuild(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def freeze(sample: Any) -> bytes:
    """A sample as bytes; raises what pickle raises where it cannot be."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(sample)
    parts: list[Any] = [stream.getvalue(), *(buffer.raw() for buffer in buffers)]
    sizes = [len(parts), *(len(part) for part in parts)]
    return b"".join([*(size.to_bytes(WORD_BYTES, "little") for size in sizes), *parts])


def thaw(data: bytes) -> Any:
    """The sample again, in memory of its own."""
    view = memoryview(bytearray(data))

    def word(number: int) -> int:
        return int.from_bytes(view[WORD_BYTES * number : WORD_BYTES * (number + 1)], "little")

    count = word(0)
    at, parts = WORD_BYTES * (count + 1), []
    for number in range(count):
        parts.append(view[at : at + word(number + 1)])
        at += word(number + 1)
    return pickle.loads(parts[0], buffers=parts[1:])

"""Part: the piece of a batch that one device was given, with the shape of the whole.

It can be converted and scaled like a tensor. Anything that would need the missing elements is
refused, because it would be silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import UsageError
from terrazzo.geometry import Box

Number = int | float


class Part:
    """``tensor`` holds ``box`` of a tensor of shape ``shape``."""

    def __init__(self, tensor: Tensor, box: Box, shape: tuple[int, ...]) -> None:
        self.tensor, self.box, self.shape = tensor, box, torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def example(self) -> Tensor:
        """A tensor of the whole shape, for exporting; its contents mean nothing."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape).contiguous()

    def _with(self, tensor: Tensor) -> Part:
        return Part(tensor, self.box, tuple(self.shape))

    def to(self, *args: Any, **kwargs: Any) -> Part:
        return self._with(self.tensor.to(*args, **kwargs))

    def float(self) -> Part:
        return self._with(self.tensor.float())

    def double(self) -> Part:
        return self._with(self.tensor.double())

    def _other(self, other: Number | Tensor) -> Number | Tensor:
        """A scalar, or a tensor with one element along every dimension that is cut."""
        if not isinstance(other, Tensor):
            return other
        offset = len(self.shape) - other.dim()
        for dim, extent in enumerate(other.shape):
            low, high = self.box.spans[dim + offset]
            if extent != 1 and high - low != self.shape[dim + offset]:
                raise UsageError(
                    f"a batch that is spread over devices was combined with a tensor of shape "
                    f"{list(other.shape)}; only scalars and per-channel values are possible here. "
                    "Do it inside the model, or before the feed."
                )
        return other

    def __add__(self, other: Number | Tensor) -> Part:
        return self._with(self.tensor + self._other(other))

    def __sub__(self, other: Number | Tensor) -> Part:
        return self._with(self.tensor - self._other(other))

    def __mul__(self, other: Number | Tensor) -> Part:
        return self._with(self.tensor * self._other(other))

    def __truediv__(self, other: Number | Tensor) -> Part:
        return self._with(self.tensor / self._other(other))

    __radd__, __rmul__ = __add__, __mul__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"this batch is spread over devices (here {self.box} of {list(self.shape)}), so "
            f".{name} would be wrong on a part. Do it inside the model, or before the feed."
        )

    def __repr__(self) -> str:
        return f"Part({self.box} of {list(self.shape)}, {self.dtype})"

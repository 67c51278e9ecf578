"""Part: the piece of a batch that one device was given, with the shape of the whole.

It can be converted and scaled like a tensor. Anything that would need the missing elements is
refused, because it would be silently wrong.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.errors import UsageError
from terrazzo.geometry import Box

Number = int | float


class Origin(Protocol):
    """Where a part came from, and can come from once more."""

    epoch: int
    """Of the members that it was spread over."""

    def spread(self, boxes: Sequence[Box]) -> Tensor:
        """On all devices at once: this device's box, as it was read."""


class Part:
    """``tensor`` holds ``box`` of a tensor of shape ``shape``.

    ``origin`` can spread the batch anew; ``history`` is what has been done to it since.
    """

    requires_grad = False

    def __init__(
        self,
        tensor: Tensor,
        box: Box,
        shape: tuple[int, ...],
        *,
        origin: Origin | None = None,
        history: tuple[Callable[[Part], Part], ...] = (),
    ) -> None:
        self.tensor, self.box, self.shape = tensor, box, torch.Size(shape)
        self.origin, self.history = origin, history

    def again(self, boxes: Sequence[Box], device: int) -> Part:
        """The same batch, spread by other boxes."""
        assert self.origin is not None
        part = Part(self.origin.spread(boxes), boxes[device], tuple(self.shape), origin=self.origin)
        for act in self.history:
            part = act(part)
        return part

    def whole_boxes(self, devices: int) -> tuple[Box, ...]:
        """All of it, on every device."""
        return (Box.whole(tuple(self.shape)),) * devices

    # ---- what a part knows of the whole --------------------------------------------------

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

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0]

    def example(self) -> Tensor:
        """A tensor of the whole shape, for exporting; its contents mean nothing."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape).contiguous()

    # ---- what can be done to every element alone -----------------------------------------

    def _with(self, tensor: Tensor, act: Callable[[Part], Part]) -> Part:
        history = () if self.origin is None else (*self.history, act)
        return Part(tensor, self.box, tuple(self.shape), origin=self.origin, history=history)

    def to(self, *args: Any, **kwargs: Any) -> Part:
        return self._with(self.tensor.to(*args, **kwargs), lambda part: part.to(*args, **kwargs))

    def cpu(self) -> Part:
        return self._with(self.tensor.cpu(), Part.cpu)

    def cuda(self, *args: Any, **kwargs: Any) -> Part:
        return self._with(
            self.tensor.cuda(*args, **kwargs), lambda part: part.cuda(*args, **kwargs)
        )

    def type(self, dtype: torch.dtype) -> Part:
        return self.to(dtype)

    def float(self) -> Part:
        return self.to(torch.float32)

    def double(self) -> Part:
        return self.to(torch.float64)

    def half(self) -> Part:
        return self.to(torch.float16)

    def bfloat16(self) -> Part:
        return self.to(torch.bfloat16)

    def _combined(self, call: Callable[[Any, Any], Tensor], other: Number | Tensor) -> Part:
        """With a scalar, or a tensor with one element along every dimension that is cut."""
        again: Callable[[Part], Part] = lambda part: part._combined(call, other)  # noqa: E731
        if isinstance(other, Tensor) and other.requires_grad:
            raise _refusal(self, "scaling it with something that is trained")
        if isinstance(other, Tensor) and other.dim():
            self._refuse_uneven(other)
            if self.box.is_empty:  # only the dtype is left to work out
                flat = call(self.tensor.reshape(-1), other.reshape(-1)[:1])
                return self._with(flat.view(self.tensor.shape), again)
        elif not isinstance(other, (numbers.Number, Tensor)):
            raise _refusal(self, f"combining it with a {type(other).__name__}")
        return self._with(call(self.tensor, other), again)

    def _refuse_uneven(self, other: Tensor) -> None:
        offset = len(self.shape) - other.dim()
        fits = offset >= 0 and all(
            extent == 1 or (extent == self.shape[dim] and self._is_uncut(dim))
            for dim, extent in enumerate(other.shape, start=offset)
        )
        if not fits:
            raise UsageError(
                f"a batch that is spread over devices ({list(self.shape)}) was combined with a "
                f"tensor of shape {list(other.shape)}; only scalars and per-channel values are "
                "possible here. Do it inside the model, or before the feed."
            )

    def _is_uncut(self, dim: int) -> bool:
        """Samples and channels are never cut, and an empty box says nothing about the others."""
        low, high = self.box.spans[dim]
        return high - low == self.shape[dim] or (self.box.is_empty and dim < self.ndim - 2)

    def __add__(self, other: Number | Tensor) -> Part:
        return self._combined(operator.add, other)

    def __sub__(self, other: Number | Tensor) -> Part:
        return self._combined(operator.sub, other)

    def __mul__(self, other: Number | Tensor) -> Part:
        return self._combined(operator.mul, other)

    def __truediv__(self, other: Number | Tensor) -> Part:
        return self._combined(operator.truediv, other)

    def __rsub__(self, other: Number | Tensor) -> Part:
        return self._combined(lambda mine, given: given - mine, other)

    __radd__, __rmul__ = __add__, __mul__
    add, sub, mul, div = __add__, __sub__, __mul__, __truediv__

    # ---- what cannot ---------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(self, f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """torch's functions ask here first: arithmetic goes on, the rest is refused."""
        given = pytree.tree_leaves((args, kwargs))
        part = next(value for value in given if isinstance(value, Part))
        if function in _REVERSED and len(args) == 2 and isinstance(args[1], Part) and not kwargs:
            return _REVERSED[function](part, args[0])
        raise _refusal(part, f"torch.{getattr(function, '__name__', function)}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise _refusal(self, "indexing it")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise _refusal(self, "writing into it")

    def __iter__(self) -> Iterator[Any]:
        raise _refusal(self, "iterating over it")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal(self, "making a numpy array of it")

    def __repr__(self) -> str:
        return f"Part({self.box} of {list(self.shape)}, {self.dtype})"


_REVERSED: dict[Any, Callable[[Part, Any], Part]] = {
    Tensor.add: Part.__radd__,
    Tensor.mul: Part.__rmul__,
    Tensor.sub: Part.__rsub__,
    Tensor.__add__: Part.__radd__,
    Tensor.__mul__: Part.__rmul__,
    Tensor.__sub__: Part.__rsub__,
}
"""``tensor + part``: torch asks the part, and sums do not mind the order."""


def _refusal(part: Part, what: str) -> UsageError:
    return UsageError(
        f"this batch is spread over devices (here {part.box} of {list(part.shape)}), so {what} "
        "would be wrong on a part. Do it inside the model, or before the feed."
    )

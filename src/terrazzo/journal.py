"""The journal: numbers that a training script wants to see in the record of its run."""

from __future__ import annotations

from numbers import Integral, Real
from types import NoneType

from torch import Tensor

from terrazzo.errors import UsageError
from terrazzo.runtime.links import recorder


def log(*, step: int | None = None, **numbers: float | Tensor) -> None:
    """Notes numbers of a step: ``tz.log(loss=loss, rate=0.1)``; ``terrazzo report`` draws them.

    Device 0 writes them down, on the others and without a recording nothing happens, so call it on
    all. A number is a float, an int or a tensor of one element, which is read later, when lines are
    written anyhow. Steps are counted from 1 for each name, unless ``step`` says otherwise.
    """
    if not isinstance(step, (Integral, NoneType)):
        raise UsageError(f"tz.log(step=...) takes a whole number, this is {type(step).__name__}")
    for name, value in numbers.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            continue
        if not _is_number(value):
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"tz.log({name}=...) takes a number or a tensor of one element, this is {seen}: "
                "log its mean, say"
            )
    writer = recorder()
    if numbers and writer is not None and writer.device == 0:
        writer.log(numbers, step)


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # which NumPy's numbers are too

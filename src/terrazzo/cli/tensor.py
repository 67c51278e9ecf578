"""An input tensor as written on the command line: ``2x3x224x224``, or ``2x64:int64``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = ("float64", "int64", "int32", "bool")
FLOAT = DTYPES[0]
HIGHEST_INTEGER = 10  # small enough to be a class or a token of most models


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one input. Floating point is float64: checks are made in it."""

    shape: tuple[int, ...]
    dtype: str = FLOAT

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        shape, colon, dtype = text.partition(":")
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape):
            raise UsageError(
                f"--input {text} is no shape; write sizes joined by x, such as 2x3x224x224"
            )
        if colon and dtype not in DTYPES:
            raise UsageError(f"--input {text}: type {dtype!r} is not one of {', '.join(DTYPES)}")
        sizes = tuple(int(size) for size in shape.split("x"))
        if 0 in sizes:
            raise UsageError(f"--input {text} has a size of 0; every size must be at least 1")
        return cls(sizes, dtype or FLOAT)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return shape if self.dtype == FLOAT else f"{shape}:{self.dtype}"

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Normal floats, integers from 0 to 9, or fair booleans."""
        import torch

        if self.dtype == FLOAT:
            return torch.randn(self.shape, dtype=torch.float64, generator=generator)
        high = 2 if self.dtype == "bool" else HIGHEST_INTEGER
        drawn = torch.randint(high, self.shape, generator=generator)
        return drawn.to(getattr(torch, self.dtype))

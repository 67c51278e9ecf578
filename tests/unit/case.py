"""A case: one small module, the inputs it takes, and many of them side by side as one model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

H, W = 33, 35
MAP = (2, 4, H, W)

Build = Callable[[], nn.Module]


class Fn(nn.Module):
    """A function as a module; further tensors become its parameters."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(nn.Parameter(tensor) for tensor in parameters)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.own)


@dataclass(frozen=True)
class Case:
    """A module, the shapes of its maps, and further inputs (targets) that are no maps.

    ``bare``: nothing may come before the operator, because its input is special (coarse steps, so
    that values tie). ``ends``: the operator truly mixes positions, or torch itself is of two minds
    about it, and it is meant to run whole.
    """

    build: Build
    maps: tuple[tuple[int, ...], ...] = (MAP,)
    extra: Callable[[], tuple[Tensor, ...]] = tuple
    bare: bool = False
    ends: bool = False

    def inputs(self) -> tuple[Tensor, ...]:
        """The same numbers on every call and every device."""
        draw = torch.Generator().manual_seed(3)
        maps = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in self.maps]
        if self.bare:
            maps = [(m * 2).round() / 2 for m in maps]
        torch.manual_seed(4)
        return (*maps, *self.extra())

    def module(self) -> nn.Module:
        torch.manual_seed(5)
        return self.build().double()


def fn(function: Callable[..., Any], *parameters: Tensor) -> Build:
    """A builder of a function of one or more maps, then its parameters."""
    return lambda: Fn(function, *parameters)


def two(function: Callable[..., Any], *parameters: Tensor) -> Case:
    return Case(fn(function, *parameters), maps=(MAP, MAP))


def ramp(*shape: int) -> Tensor:
    """A parameter of this shape, away from zero."""
    return torch.linspace(0.5, 1.5, torch.Size(shape).numel()).view(shape)


class Bundle(nn.Module):
    """Many cases side by side as one model, so that exporting them costs once.

    Its parameters and outputs are named by case, and so is what goes wrong with them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], takes: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({label(name): module for name, module in modules.items()})
        self.takes = tuple(takes)

    def forward(self, *inputs: Tensor) -> dict[str, Any]:
        results, start = {}, 0
        for (name, part), count in zip(self.parts.items(), self.takes, strict=True):
            results[name] = part(*inputs[start : start + count])
            start += count
        return results


def label(name: str) -> str:
    """A case's name as a module may be called."""
    return re.sub(r"\W+", "_", name)


def bundle(
    cases: Mapping[str, Case], wrap: Callable[[Case], nn.Module] = Case.module
) -> tuple[Bundle, tuple[Tensor, ...]]:
    """The bundle of some cases, and its inputs."""
    inputs = [case.inputs() for case in cases.values()]
    model = Bundle({name: wrap(case) for name, case in cases.items()}, [len(i) for i in inputs])
    return model, tuple(tensor for group in inputs for tensor in group)

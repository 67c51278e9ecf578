"""The operator table of the tests: every operator a CNN uses, in the ways that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    that values tie). ``ends``: the operator truly mixes positions, and is meant to run whole.
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


def conv(*args: Any, **kwargs: Any) -> Build:
    return lambda: nn.Conv2d(4, *args, **kwargs)


def up(*args: Any, **kwargs: Any) -> Build:
    return lambda: nn.ConvTranspose2d(4, *args, **kwargs)


def resize(**kwargs: Any) -> Build:
    return fn(lambda x: F.interpolate(x, **kwargs))


def pad(amounts: tuple[int, ...], mode: str = "constant", value: float | None = None) -> Build:
    return fn(lambda x: F.pad(x, amounts, mode=mode, value=value))


CONVOLUTIONS: dict[str, Case | Build] = {
    "conv 3": conv(6, 3, padding=1),
    "conv no padding": conv(6, 3, bias=False),
    "conv stride 2": conv(6, 3, stride=2, padding=1),
    "conv stride over kernel": conv(3, 2, stride=3),
    "conv stride over kernel padded": conv(3, 1, stride=4, padding=2),
    "conv dilation": conv(4, 3, dilation=3, padding=3),
    "conv dilation strided": conv(4, 3, dilation=4, padding=2, stride=3),
    "conv groups": conv(6, 3, padding=1, groups=2),
    "conv depthwise": conv(8, 5, padding=2, groups=4),
    "conv even": conv(5, 4, stride=2, padding=1),
    "conv even wide padding": conv(5, 2, padding=1),
    "conv two ways": conv(5, (3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "conv same": conv(5, (3, 5), padding="same"),
    "conv same even": conv(5, 4, padding="same", dilation=3),
    "conv valid": conv(5, 3, padding="valid", stride=2),
    "conv 1": conv(6, 1),
    "conv 1 padded": conv(6, 1, padding=1),
    "conv 1 padded far": conv(3, 1, padding=3, stride=2),
    "conv padding over kernel": conv(3, 2, padding=5),
    "conv reflect": conv(5, 3, padding=1, padding_mode="reflect"),
    "conv replicate": conv(5, 5, padding=2, padding_mode="replicate", stride=2),
    "conv circular": conv(5, 3, padding=1, padding_mode="circular"),
    "up 2": up(5, 2, stride=2),
    "up overlapping": up(3, 4, stride=2, padding=1),
    "up overlapping far": up(3, 7, stride=2, padding=3),
    "up output padding": up(3, 3, stride=2, padding=1, output_padding=1),
    "up gaps": up(3, 2, stride=3),
    "up gaps and output padding": up(3, 1, stride=4, output_padding=3),
    "up gaps cropped": up(3, 2, stride=4, padding=3, output_padding=(1, 2)),
    "up dilation": up(3, 3, stride=2, dilation=2, padding=2, output_padding=1),
    "up dilation gaps": up(3, 2, stride=3, dilation=4, padding=1),
    "up groups": up(6, 3, stride=2, groups=2, padding=1, bias=False),
    "up stride 1": up(4, 3, padding=1),
    "up two ways": up(3, (2, 5), stride=(1, 3), padding=(1, 0), output_padding=(0, 2)),
}

POOLS: dict[str, Case | Build] = {
    "max pool 2": lambda: nn.MaxPool2d(2),
    "max pool overlapping": lambda: nn.MaxPool2d(3, 2, 1),
    "max pool stride 1": lambda: nn.MaxPool2d(3, 1, 1),
    "max pool ceil": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "max pool ceil padded": lambda: nn.MaxPool2d(3, 3, 1, ceil_mode=True),
    "max pool dilation": lambda: nn.MaxPool2d(3, 2, 1, dilation=3),
    "max pool dilation ceil": lambda: nn.MaxPool2d(2, 3, 1, dilation=4, ceil_mode=True),
    "max pool two ways": lambda: nn.MaxPool2d((2, 5), (3, 2), (1, 2)),
    "max pool negative input": fn(lambda x: F.max_pool2d(x - 9, 3, 2, 1)),
    "max pool ties": Case(lambda: nn.MaxPool2d(3, 2, 1), bare=True),
    "avg pool 2": lambda: nn.AvgPool2d(2),
    "avg pool counting": lambda: nn.AvgPool2d(3, 2, 1),
    "avg pool not counting": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "avg pool ceil": lambda: nn.AvgPool2d(4, 3, 2, ceil_mode=True),
    "avg pool ceil not counting": lambda: nn.AvgPool2d(5, 4, 2, True, count_include_pad=False),
    "avg pool ceil no padding": lambda: nn.AvgPool2d(4, 4, ceil_mode=True),
    "avg pool divisor": lambda: nn.AvgPool2d((2, 3), 2, 1, divisor_override=7),
    "avg pool divisor ceil": lambda: nn.AvgPool2d(3, 2, 1, True, divisor_override=2),
    "adaptive avg 1": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive avg 5x7": lambda: nn.AdaptiveAvgPool2d((5, 7)),
    "adaptive avg dividing": lambda: nn.AdaptiveAvgPool2d((11, 5)),
    "adaptive avg one way": lambda: nn.AdaptiveAvgPool2d((1, 6)),
    "adaptive avg growing": lambda: nn.AdaptiveAvgPool2d((50, 40)),
    "adaptive avg same": lambda: nn.AdaptiveAvgPool2d((None, 4)),
    "adaptive max 1": lambda: nn.AdaptiveMaxPool2d(1),
    "adaptive max 1 ties": Case(lambda: nn.AdaptiveMaxPool2d(1), bare=True),
    "adaptive max 5x7": lambda: nn.AdaptiveMaxPool2d((5, 7)),
    "adaptive max dividing": lambda: nn.AdaptiveMaxPool2d((3, 7)),
}

RESIZES: dict[str, Case | Build] = {
    "nearest 2": resize(scale_factor=2),
    "nearest 3": resize(scale_factor=3),
    "nearest 4x1": resize(scale_factor=(4.0, 1.0)),
    "nearest 1.5": resize(scale_factor=1.5),
    "nearest almost 2": resize(scale_factor=2.02),
    "nearest almost 4": Case(resize(scale_factor=4.3), maps=((2, 4, 3, 7),)),
    "nearest up to size": resize(size=(50, 77)),
    "nearest down": resize(scale_factor=0.6),
    "nearest down to size": resize(size=(7, 16)),
    "nearest odd factor": Case(resize(size=(9 * 41, 35)), maps=((1, 2, 9, 35),)),
    "bilinear 2": resize(scale_factor=2, mode="bilinear"),
    "bilinear 2 corners": resize(scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear 1.7": resize(scale_factor=1.7, mode="bilinear"),
    "bilinear 1.7 corners": resize(scale_factor=1.7, mode="bilinear", align_corners=True),
    "bilinear 3": resize(scale_factor=3, mode="bilinear"),
    "bilinear recomputed": resize(scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
    "bilinear up to size": resize(size=(71, 44), mode="bilinear"),
    "bilinear down": resize(scale_factor=0.45, mode="bilinear"),
    "bilinear down corners": resize(size=(12, 17), mode="bilinear", align_corners=True),
    "bilinear half": Case(resize(scale_factor=0.5, mode="bilinear"), maps=((2, 4, 32, 36),)),
    "bilinear 3 to 4": Case(resize(size=(44, 24), mode="bilinear"), maps=((2, 4, 33, 36),)),
    "bilinear to one": resize(size=(1, 9), mode="bilinear", align_corners=True),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "pixel unshuffle": Case(lambda: nn.PixelUnshuffle(2), maps=((2, 3, 34, 36),)),
    "pixel unshuffle 3": Case(lambda: nn.PixelUnshuffle(3), maps=((2, 2, 33, 36),)),
    "pad": pad((3, 1, 0, 2), value=1.5),
    "pad far": pad((20, 18, 25, 30)),
    "pad negative": pad((-1, 2, -3, -2)),
    "pad mixed and channels": pad((-2, 3, 4, -1, 1, 2), value=-1.0),
    "pad reflect": pad((5, 3, 0, 7), "reflect"),
    "pad reflect far": pad((34, 1, 32, 20), "reflect"),
    "pad reflect negative": pad((-2, 3, 4, -1), "reflect"),
    "pad replicate": pad((9, 1, 0, 40), "replicate"),
    "pad replicate negative": pad((-2, 3, 4, -1), "replicate"),
    "pad circular": pad((3, 1, 2, 20), "circular"),
    "pad circular negative": pad((-2, 3, 4, -1), "circular"),
    "crop": fn(lambda x: x[:, :, 2:-3, 1:]),
    "crop by steps": fn(lambda x: x[:, :, 1::2, ::3]),
    "crop to a corner": fn(lambda x: x[:, :, -5:, :4]),
    "crop centre and add": two(lambda x, y: F.max_pool2d(x, 3, 1)[:, :, 2:-2] + y[:, :, 3:-3, 1:-1]),
}

REDUCTIONS: dict[str, Case | Build] = {
    "mean": fn(lambda x: x.mean((2, 3))),
    "mean kept": fn(lambda x: x * x.mean((-2, -1), keepdim=True)),
    "mean of all": fn(lambda x: x.mean()),
    "mean of rows": fn(lambda x: x * x.mean(3, keepdim=True)),
    "mean of columns": fn(lambda x: x.mean(2)),
    "mean of sample": fn(lambda x: x.mean((1, 2, 3), keepdim=True) + x),
    "mean of channels": fn(lambda x: x.mean(1, keepdim=True)),
    "mean of channels dropped": fn(lambda x: x.mean(1).unsqueeze(1) * x),
    "mean of batch": fn(lambda x: x.mean(0, keepdim=True) - x),
    "sum": fn(lambda x: x.sum((2, 3))),
    "sum of all": fn(lambda x: x.sum()),
    "sum of rows": fn(lambda x: x.sum(-1, keepdim=True).tanh() * x),
    "sum of comparisons": fn(lambda x: x * (x > 0).sum((2, 3), keepdim=True)),
    "sum of channels": fn(lambda x: x.sum(1, keepdim=True)),
    "amax": fn(lambda x: x.amax((2, 3))),
    "amax kept": fn(lambda x: x - x.amax((2, 3), keepdim=True)),
    "amax of all": fn(lambda x: x.amax()),
    "amax of rows": fn(lambda x: x - x.amax(3, keepdim=True)),
    "amax ties": Case(fn(lambda x: x.clamp(-2, 2).amax((2, 3))), bare=True),
    "amax of rows ties": Case(fn(lambda x: x.amax(3)), bare=True),
    "amax of channels": fn(lambda x: x.amax(1, keepdim=True)),
    "amin": fn(lambda x: x.amin((2, 3), keepdim=True)),
    "amin ties": Case(fn(lambda x: x.amin((2, 3))), bare=True),
    "max of channels": fn(lambda x: torch.max(x, 1, keepdim=True)[0]),
    "min of channels": fn(lambda x: x * x.min(1, keepdim=True).values),
    "variance of channels": fn(lambda x: x / x.std(1, keepdim=True) + x.var(1, keepdim=True)),
    "logsumexp of channels": fn(lambda x: x.logsumexp(1, keepdim=True)),
    "product of channels": fn(lambda x: x.prod(1, keepdim=True)),
    "argmax of channels": fn(lambda x: x * x.argmax(1, keepdim=True)),
    "norm 2": fn(lambda x: torch.linalg.vector_norm(x, 2, (2, 3))),
    "norm 2 kept": fn(lambda x: x / torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True)),
    "norm 1": fn(lambda x: torch.linalg.vector_norm(x, 1, (2, 3))),
    "norm 3": fn(lambda x: torch.linalg.vector_norm(x, 3, (2, 3), keepdim=True)),
    "norm of rows": fn(lambda x: x.norm(p=2, dim=3, keepdim=True) * x),
    "norm of zeros": fn(lambda x: torch.linalg.vector_norm((x - 99).relu(), 2, (2, 3)) + x.mean()),
    "norm of channels": fn(lambda x: F.normalize(x, dim=1)),
    "norm inf": Case(fn(lambda x: torch.linalg.vector_norm(x, float("inf"), (2, 3))), ends=True),
    "norm half": Case(
        fn(lambda x: torch.linalg.vector_norm(x.relu(), 0.5, (2, 3))), ends=True, maps=((1, 2, 9, 9),)
    ),
}  # fmt: skip

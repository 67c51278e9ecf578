"""The operator table of the tests: every operator a CNN uses, in the ways that go wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from blocks import BLOCKS, NORMS
from case import MAP, Build, Case, Fn, H, W, fn, ramp, two
from losses import LOSSES
from torch import Tensor, nn


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
    "nearest almost 2": Case(resize(scale_factor=2.02), ends=True),
    "nearest almost 4": Case(resize(scale_factor=4.3), maps=((2, 4, 3, 7),)),
    "nearest up to size": resize(size=(50, 77)),
    "nearest down": resize(scale_factor=0.6),
    "nearest down to size": resize(size=(7, 16)),
    "nearest odd factor": Case(resize(size=(369, 35)), maps=((1, 2, 9, 35),), ends=True),
    "bilinear 2": resize(scale_factor=2, mode="bilinear"),
    "bilinear 2 corners": resize(scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear 1.7": resize(scale_factor=1.7, mode="bilinear"),
    "bilinear 1.7 corners": resize(scale_factor=1.7, mode="bilinear", align_corners=True),
    "bilinear almost 1": resize(scale_factor=1.02, mode="bilinear"),
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
    "crop centre and add": two(
        lambda x, y: F.max_pool2d(x, 3, 1)[:, :, 2:-2] + y[:, :, 3:-3, 1:-1]
    ),
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
    "place of the maximum": Case(fn(lambda x: x * torch.max(x, 1, keepdim=True)[1]), ends=True),
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
    "norm half": Case(fn(lambda x: torch.linalg.vector_norm(x.relu(), 0.5, (2, 3))), ends=True),
}  # fmt: skip

ARITHMETIC: dict[str, Case | Build] = {
    "cat": two(lambda x, y: torch.cat([x, y, x], 1)),
    "cat with a whole tensor": fn(lambda x, c: torch.cat([x, c.expand(2, 3, H, W)], 1), ramp(H, 1)),
    "cat of batches": two(lambda x, y: torch.cat([x, y], 0)),
    "cat with nothing": Case(fn(lambda x: torch.cat([x[:, :0], x], 1)), ends=True),
    "stack": two(lambda x, y: torch.stack([x, y], 1).mean(1)),
    "stack in front": two(lambda x, y: torch.stack([x, y, x]).amax(0)),
    "add sub mul div": two(lambda x, y: (x + y * 2 - x * y) / (y * y + 1)),
    "broadcast channels": fn(lambda x, c: x * c + 1 - c, ramp(1, 4, 1, 1)),
    "broadcast low rank": fn(lambda x, c: x / c, ramp(4, 1, 1)),
    "broadcast columns": fn(lambda x, c: x * c, ramp(W)),
    "broadcast rows": fn(lambda x, c: c - x, ramp(H, 1)),
    "broadcast position": fn(lambda x, c: x + c, ramp(1, 4, H, W)),
    "broadcast scalar": fn(lambda x, c: x * c, ramp(1)[0]),
    "broadcast higher rank": fn(lambda x, c: (x * c).sum(0), ramp(3, 1, 1, 1, 1)),
    "broadcast maps": Case(fn(lambda x, y: x * y), maps=(MAP, (2, 1, H, W))),
    "broadcast one row": Case(fn(lambda x, y: x * y), maps=(MAP, (2, 4, 1, W))),
    "addcmul": two(lambda x, y: torch.addcmul(x, y, x, value=0.5)),
    "addcdiv": two(lambda x, y: torch.addcdiv(x, y, x * x + 1, value=2.0)),
    "lerp": two(lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(x, y, x.sigmoid())),
    "where": two(lambda x, y: torch.where(x > y, x * 2, y)),
    "where scalar": fn(lambda x: torch.where(x > 0, x, 0.0) + torch.where(x < 0, 1.0, x)),
    "masked fill": fn(lambda x: x.masked_fill(x > 0.5, 0.1)),
    "clamp": fn(lambda x: x.clamp(-0.7, 0.9) + x.clamp(min=0.1) + x.clamp(max=0.2)),
    "clamp by maps": two(lambda x, y: x.clamp(min=y - 1, max=y + 1)),
    "pow": fn(lambda x: x**3 + 2**x + (x * x + 0.1) ** x + x.square()),
    "maximum minimum": two(lambda x, y: torch.maximum(x, y) * torch.minimum(x, y + 1)),
    "roots and logs": fn(lambda x: (x * x + 1).sqrt() + (x * x + 1).log() + (x * x + 1).rsqrt()),
    "trigonometry": two(lambda x, y: x.sin() + y.cos() * x.tan() + x.atan() + torch.atan2(x, y)),
    "exponentials": fn(lambda x: x.exp() + x.expm1() + x.exp2() + x.log1p().nan_to_num() + x.erf()),
    "rounding": fn(lambda x: x.round() * x + x.floor() + x.ceil() + x.trunc() + x.frac() * 2),
    "reciprocal": fn(lambda x: 1 / (x.abs() + 1) - (x * x + 1).reciprocal() + -x),
    "hyperbolic": fn(lambda x: x.sinh() + x.cosh() + x.tanh() + x.asinh() + (x.tanh() / 2).atanh()),
    "detach": fn(lambda x: x * x.detach() + torch.zeros_like(x) + torch.full_like(x, 3.0)),
    "remainder": fn(lambda x: torch.remainder(x, 0.7) + torch.fmod(x, 0.9)),
    "logaddexp": two(lambda x, y: torch.logaddexp(x, y) + x.hypot(y) + x.xlogy(y * y)),
    "float and back": fn(lambda x: x.detach().float().double() * x + x.to(torch.float64)),
    "comparison as mask": two(lambda x, y: x * (x > y).to(x.dtype) + y * (x.gt(0) & y.le(1))),
    "expand": fn(lambda x: x[:, :1].expand(-1, 6, -1, -1) * 2 + x[:, 1:2].expand(2, 6, H, W)),
}  # fmt: skip

ACTIVATIONS: dict[str, Case | Build] = {
    f"activation {layer}": lambda layer=layer: copy.deepcopy(layer)
    for layer in (
        nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.CELU(0.7), nn.SELU(), nn.GELU(),
        nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(),
        nn.Sigmoid(), nn.Tanh(), nn.Softplus(), nn.Softsign(), nn.LogSigmoid(), nn.Tanhshrink(),
        nn.Softshrink(), nn.Hardshrink(), nn.Threshold(0.1, 0.2), nn.GLU(1), nn.PReLU(),
        nn.PReLU(4), nn.Softmax2d(), nn.Softmin(1),
    )
} | {
    "activation in place": fn(
        lambda x: F.silu(x * 2, True) + F.leaky_relu(x * 3, 0.1, True) * F.hardswish(x - 1, True)
    ),
}  # fmt: skip


def _written_slices(x: Tensor) -> Tensor:
    x = x * 2
    x[:, :2] = x[:, 2:].sigmoid()
    x[:, 3] *= 0.5
    x[:, ::3] += 1
    return x


def _written_zeros(x: Tensor) -> Tensor:
    made = x.new_zeros(2, 6, H, W)
    made[:, 1:5] = x
    made[:, 5] = x[:, 0]
    return made


def _shuffled(x: Tensor) -> Tensor:
    return x.view(2, 2, 2, H, W).transpose(1, 2).reshape(2, 4, H, W)


def _channels_last(build: Build) -> Build:
    return lambda: nn.Sequential(
        Fn(lambda x: x.permute(0, 2, 3, 1)), build(), Fn(lambda x: x.permute(0, 3, 1, 2))
    )


SHAPES: dict[str, Case | Build] = {
    "chunk": fn(lambda x: (lambda a, b: a * b.sigmoid())(*x.chunk(2, 1))),
    "chunk uneven": fn(lambda x: torch.cat(x.chunk(3, 1)[::-1], 1)),
    "split": fn(lambda x: (lambda a, b: torch.cat([b, a.relu()], 1))(*x.split([1, 3], 1))),
    "split unused": fn(lambda x: x.split(2, 1)[1] * 3),
    "select": fn(lambda x: x.select(1, 2).unsqueeze(1) * x[:, -1:]),
    "select a sample": fn(lambda x: x[1].unsqueeze(0) + x),
    "unbind": fn(lambda x: torch.stack([part * (i + 1) for i, part in enumerate(x.unbind(1))], 1)),
    "slice assignment": fn(_written_slices),
    "slice assignment into zeros": fn(_written_zeros),
    "permute and back": fn(lambda x: (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2)),
    "rows become columns": fn(lambda x: F.max_pool2d(x.transpose(2, 3), 3, 2)),
    "channel shuffle": fn(_shuffled),
    "groups into batch": fn(lambda x: F.avg_pool2d(x.reshape(8, 1, H, W), 3, 2).view(2, 4, 16, 17)),
    "flatten channels": fn(lambda x: x.flatten(0, 1).unflatten(0, (2, 4)) * 2),
    "unflatten": fn(lambda x: x.unflatten(1, (2, 2)).mean(2)),
    "squeeze": fn(lambda x: (x.unsqueeze(0).unsqueeze(3) * 2).squeeze(3).squeeze(0)),
    "squeeze channel": fn(lambda x: x.mean(1, keepdim=True).squeeze(1).unsqueeze(1) * x),
    "norm of five dimensions": Case(
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm3d(2), nn.Flatten(1, 2)),
        ends=True,
    ),
    "contiguous": fn(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3).clone() + x),
    "flatten positions": Case(fn(lambda x: x.flatten(2).softmax(-1).view(2, 4, H, W)), ends=True),
    "flip": Case(fn(lambda x: x.flip(3) * 2), ends=True),
    "select a row": Case(fn(lambda x: x[:, :, 3].unsqueeze(2) * x), ends=True),
    "linear": _channels_last(lambda: nn.Linear(4, 7)),
    "layer norm": _channels_last(lambda: nn.LayerNorm(4)),
    "layer norm over positions": Case(lambda: nn.LayerNorm((4, H, W)), ends=True),
    "softmax": fn(lambda x: x.softmax(1) + x.log_softmax(1)),
    "softmax last": _channels_last(lambda: nn.Softmax(-1)),
    "softmax over rows": Case(fn(lambda x: x.softmax(2)), ends=True),
    "cumsum": fn(lambda x: x.cumsum(1)),
    "rms norm": _channels_last(lambda: nn.RMSNorm(4)),
    "channels by index": fn(
        lambda x: x[:, [2, 0, 0]] * x.index_select(1, torch.arange(3, device=x.device))
    ),
    "repeat channels": fn(lambda x: x.repeat(1, 2, 1, 1) + x.repeat(2, 1, 2, 1, 1)[1]),
    "repeat positions": Case(fn(lambda x: x.repeat(1, 1, 2, 1)), ends=True),
}  # fmt: skip


RANDOM: dict[str, Case | Build] = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout of channels": lambda: nn.Dropout2d(0.4),
    "dropout in place": fn(lambda x: F.dropout(x * 2, 0.5, True, True)),
    "stochastic depth": fn(lambda x: x * x.new_empty(2, 1, 1, 1).bernoulli_(0.6).div_(0.6)),
    "noise": fn(lambda x: x + torch.rand_like(x) - 0.1 * torch.randn_like(x)),
    "noise by size": fn(
        lambda x: (
            x * torch.rand(2, 1, H, W, device=x.device) + torch.randn(4, 1, 1, device=x.device)
        )
    ),
    "bernoulli": fn(lambda x: x * torch.bernoulli(x.sigmoid()) + torch.bernoulli(x * 0 + 0.3)),
    "dropout of everything": lambda: nn.Dropout(1.0),
}  # fmt: skip


TABLES: dict[str, dict[str, Case]] = {
    title: {name: case if isinstance(case, Case) else Case(case) for name, case in table.items()}
    for title, table in {
        "convolutions": CONVOLUTIONS,
        "pools": POOLS,
        "resizes": RESIZES,
        "reductions": REDUCTIONS,
        "arithmetic": ARITHMETIC,
        "activations": ACTIVATIONS,
        "shapes": SHAPES,
        "blocks": BLOCKS,
        "norms": NORMS,
        "random": RANDOM,
        "losses": LOSSES,
    }.items()
}
CASES: dict[str, Case] = {n: case for table in TABLES.values() for n, case in table.items()}

"""How operators are called: ATen's own by name, and the few that are ours.

Our kernels come in three sorts: operators whose box form is not a plain ATen call (pools with
counted divisors, look-ups, resampling), parts of reductions, and random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.runtime.convolutions.recorded import conv2d
from terrazzo.runtime.pooling import max_pool2d, turning_max_pool2d
from terrazzo.runtime.random import mix, normal, uniform


@dataclass(frozen=True, slots=True)
class Site:
    """Where and when an operator runs: what random draws depend on."""

    shape: tuple[int, ...]
    box: Box
    seed: int
    step: int
    device: torch.device


Kernel = Callable[..., Tensor]


@cache
def aten(op: str) -> Callable[..., Any]:
    """An ATen operator that takes its arguments in the order of the schema."""
    space, name, overload = op.split(".")
    target = getattr(getattr(getattr(torch.ops, space), name), overload)
    named = [a.name if a.kwarg_only else "" for a in target._schema.arguments]
    if not any(named):
        return target  # type: ignore[no-any-return]

    def call(*args: Any) -> Any:
        plain = [arg for arg, key in zip(args, named, strict=False) if not key]
        keyed = {key: arg for arg, key in zip(args, named, strict=False) if key and arg is not None}
        return target(*plain, **keyed)

    return call


@cache
def device_argument(op: str) -> int | None:
    """Where an operator that makes a tensor of nothing takes its device; None for all others."""
    space, name, *overload = op.split(".")
    if not overload:
        return None  # one of ours
    target = getattr(getattr(getattr(torch.ops, space), name), overload[0])
    arguments = target._schema.arguments
    if any("Tensor" in str(argument.type) for argument in arguments):
        return None
    return next((i for i, argument in enumerate(arguments) if argument.name == "device"), None)


# ---- box forms ------------------------------------------------------------------------------


def avg_pool(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    divisors: tuple[tuple[int, ...], ...],
    override: int | None,
) -> Tensor:
    """Sums windows, then divides by what torch counts in each."""
    if override is not None:
        return F.avg_pool2d(x, kernel, stride, divisor_override=override)
    rows, cols = divisors
    if len(set(rows)) == 1 and len(set(cols)) == 1:
        return F.avg_pool2d(x, kernel, stride, divisor_override=rows[0] * cols[0])
    total = F.avg_pool2d(x, kernel, stride, divisor_override=1)
    return total / (_numbers(rows, total).unsqueeze(-1) * _numbers(cols, total))


def _numbers(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def take(x: Tensor, look_up: tuple[tuple[int, tuple[int, ...]], ...]) -> Tensor:
    """Picks rows along some dimensions, with repeats."""
    for dim, rows in look_up:
        x = x.index_select(dim, torch.tensor(rows, device=x.device))
    return x


def bilinear(x: Tensor, places: tuple[Any, ...], align_corners: bool) -> Tensor:
    """Linear resampling of a piece, with positions computed as torch computes them."""
    lead = x.dim() - 2
    for offset, place in enumerate(places):
        x = _linear(x, lead + offset, place, align_corners)
    return x


def _linear(x: Tensor, dim: int, place: tuple[Any, ...], align_corners: bool) -> Tensor:
    (low, high), start, extent, result, scale = place
    if extent == result:  # torch copies, whatever the scale says
        return x.narrow(dim, low - start, high - low)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    outputs = torch.arange(low, high, dtype=exact, device=x.device)
    if align_corners:
        step = torch.tensor(extent - 1, dtype=exact) / max(result - 1, 1)
        source = outputs * step
    else:
        ratio = 1.0 / scale if scale else torch.tensor(extent, dtype=exact) / result
        source = ((outputs + 0.5) * torch.as_tensor(ratio, dtype=exact) - 0.5).clamp(min=0)
    before = source.floor().to(torch.int64).clamp(max=extent - 1)
    share = (source - before).clamp(0, 1)
    after = (before + (share > 0)).clamp(max=extent - 1)  # at the border there may be no next one
    shape = [1] * x.dim()
    shape[dim] = high - low
    one, other = x.index_select(dim, before - start), x.index_select(dim, after - start)
    share = share.to(x.dtype).view(shape)
    mixed: Tensor = one * (1 - share) + other * share
    return mixed


def adaptive_avg(x: Tensor, cells: tuple[tuple[tuple[int, int], ...], ...]) -> Tensor:
    """Means over windows of uneven size, as two small matrix products."""
    rows, cols = (
        _averages(spans, extent, x) for spans, extent in zip(cells, x.shape[-2:], strict=True)
    )
    return rows @ (x @ cols.transpose(0, 1))


def _averages(spans: Sequence[tuple[int, int]], extent: int, like: Tensor) -> Tensor:
    matrix = torch.zeros(len(spans), extent, dtype=like.dtype, device=like.device)
    for row, (low, high) in enumerate(spans):
        matrix[row, low:high] = 1.0 / (high - low)
    return matrix


def adaptive_max(x: Tensor, cells: tuple[tuple[tuple[int, int], ...], ...]) -> Tensor:
    """The maximum of each window; torch's own pool decides ties."""
    rows, cols = cells
    return torch.cat(
        [
            torch.cat(
                [F.adaptive_max_pool2d(x[..., top:bottom, left:right], 1) for left, right in cols],
                -1,
            )
            for top, bottom in rows
        ],
        -2,
    )


def max_values(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return torch.max(x, dim, keepdim).values


def min_values(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return torch.min(x, dim, keepdim).values


def copy(target: Tensor, source: Tensor) -> Tensor:
    """What an assignment into a slice leaves there."""
    return source.to(target.dtype).expand(target.shape)


def adaptive_max_whole(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.adaptive_max_pool2d(x, size)


# ---- parts of reductions --------------------------------------------------------------------


def summing(x: Tensor) -> Tensor:
    """In the precision in which parts are summed: float64, float32 or int64."""
    if not x.is_floating_point():
        return x.to(torch.int64)
    return x if x.dtype in (torch.float64, torch.float32) else x.float()


def part_mean(x: Tensor, dims: Any, keepdim: bool, count: int, _: Any) -> Tensor:
    return summing(x).sum(dims, keepdim=keepdim) / count


def part_sum(x: Tensor, dims: Any, keepdim: bool, count: int, _: Any) -> Tensor:
    return summing(x).sum(dims, keepdim=keepdim)


def part_power(x: Tensor, dims: Any, keepdim: bool, count: int, power: float) -> Tensor:
    x = summing(x)
    return (x * x if power == 2 else x.abs() ** power).sum(dims, keepdim=keepdim)


def root(total: Tensor, power: float) -> Tensor:
    """The last step of a vector norm; torch gives a zero vector a zero gradient."""
    zero = total == 0
    safe = total.masked_fill(zero, 1.0)
    result = safe.sqrt() if power == 2 else safe ** (1.0 / power)
    return result.masked_fill(zero, 0.0)


def part_amax(x: Tensor, dims: Any, keepdim: bool, count: int, _: Any) -> Tensor:
    """The maximum and how often it is reached: torch shares the gradient between ties."""
    peak = x.amax(dims, keepdim=keepdim)
    ties = (x == x.amax(dims, keepdim=True)).sum(dims, keepdim=keepdim)
    return torch.stack([peak.double(), ties.double()])


def part_amin(x: Tensor, dims: Any, keepdim: bool, count: int, _: Any) -> Tensor:
    return part_amax(-x, dims, keepdim, count, None)


def part_first_max(x: Tensor, dims: Any, keepdim: bool, count: int, where: Any) -> Tensor:
    """The maximum and where in the image it comes first: torch gives that one the gradient."""
    top, left, width = where
    peak, index = F.adaptive_max_pool2d(x, 1, return_indices=True)
    row, col = index // x.shape[-1] + top, index % x.shape[-1] + left
    return torch.stack([peak.double(), (row * width + col).double()])


def part_loss(op: str, scale: int, *args: Any) -> Tensor:
    return summing(aten(op)(*args)).sum() / scale


def part_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, smoothing: float
) -> Tensor:
    """Two numbers: the summed loss, and what a mean divides by."""
    each = F.cross_entropy(
        x, target, weight, ignore_index=ignore, reduction="none", label_smoothing=smoothing
    )
    if target.is_floating_point():
        return _with_divisor(each, torch.tensor(float(each.numel()), device=x.device))
    return _with_divisor(each, _counted(target, weight, ignore))


def part_nll(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> Tensor:
    """The same for scores that are log-probabilities already."""
    each = F.nll_loss(x, target, weight, ignore_index=ignore, reduction="none")
    return _with_divisor(each, _counted(target, weight, ignore))


def _counted(target: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    """The summed weights of all targets that are not ignored."""
    counted = target != ignore
    if weight is None:
        return counted.sum()
    return (weight[target.clamp(min=0, max=weight.numel() - 1)] * counted).sum()


def _with_divisor(each: Tensor, divisor: Tensor) -> Tensor:
    total = summing(each).sum()
    return torch.stack([total, divisor.to(total.dtype)])


def negate(x: Tensor) -> Tensor:
    return -x


def quotient(pair: Tensor) -> Tensor:
    return pair[0] / pair[1]


def numerator(pair: Tensor) -> Tensor:
    return pair[0]


# ---- random draws ---------------------------------------------------------------------------


def dropout(site: Site, x: Tensor, p: float, index: int) -> Tensor:
    if p >= 1:
        return x * 0
    drawn = uniform(mix(site.seed, site.step, index), site.shape, site.box, x.device)
    return x * ((drawn < 1.0 - p).to(x.dtype) / (1.0 - p))


def bernoulli(site: Site, x: Tensor, *rest: Any) -> Tensor:
    """With a probability given, ``x`` only says what shape; without, it is the probability."""
    *given, index = rest
    drawn = uniform(mix(site.seed, site.step, index), site.shape, site.box, x.device)
    return (drawn < (given[0] if given else x.detach())).to(x.dtype)


def rand_like(site: Site, x: Tensor, index: int) -> Tensor:
    return uniform(mix(site.seed, site.step, index), site.shape, site.box, x.device).to(x.dtype)


def randn_like(site: Site, x: Tensor, index: int) -> Tensor:
    return normal(mix(site.seed, site.step, index), site.shape, site.box, x.device).to(x.dtype)


def rand(site: Site, shape: Any, dtype: torch.dtype, index: int) -> Tensor:
    return uniform(mix(site.seed, site.step, index), site.shape, site.box, site.device).to(dtype)


def randn(site: Site, shape: Any, dtype: torch.dtype, index: int) -> Tensor:
    return normal(mix(site.seed, site.step, index), site.shape, site.box, site.device).to(dtype)


KERNELS: dict[str, Kernel] = {
    f"terrazzo.{kernel.__name__}": kernel
    for kernel in (
        avg_pool, copy, max_values, min_values, take, bilinear, adaptive_avg, adaptive_max,
        part_mean, part_sum, part_power, root, part_amax, part_amin, part_first_max, part_loss,
        part_cross_entropy, part_nll, negate, quotient, numerator,
    )
} | {
    "terrazzo.adaptive_max_pool2d": adaptive_max_whole,
    "aten.conv2d.default": conv2d,
    "aten.max_pool2d.default": max_pool2d,
    "terrazzo.max_pool2d": turning_max_pool2d,
}  # fmt: skip

DRAWS: dict[str, Kernel] = {
    f"terrazzo.{kernel.__name__}": kernel
    for kernel in (dropout, bernoulli, rand_like, randn_like, rand, randn)
}


def kernel(op: str) -> Callable[..., Any]:
    """The function of an operator that needs no site."""
    return KERNELS[op] if op in KERNELS else aten(op)

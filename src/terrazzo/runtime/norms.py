"""Norms over positions that live on several devices.

Each device sums up the elements it owns as (count, mean, M2); the parts are merged, so no variance
is ever a difference of large numbers. Normalising and its gradient then run on everything a device
computes, copies of halo elements included: the gradients of mean and variance are sums over all
copies, and flow back to owned elements only, because only those were counted.

A norm sees its input as rows of equal statistics: the channels of a batch norm, every (sample,
channel) of an instance norm, every (sample, group) of a group norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrazzo.graph.rules.norms import BATCH, rows_of
from terrazzo.runtime.links import Links
from terrazzo.runtime.staging import from_host, to_host

EVERYWHERE = (0, 2, 3)
"""The dimensions that statistics run over."""


def precise(dtype: torch.dtype) -> torch.dtype:
    """The precision of statistics: float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(x: Tensor, kind: str, groups: int) -> Tensor:
    """The input with equal statistics along dimension 1, as a batch norm sees it."""
    if kind == BATCH:
        return x
    rows = rows_of(kind, groups, tuple(x.shape))
    return x.reshape(1, rows, x.shape[0] * x.shape[1] // rows * x.shape[2], x.shape[3])


CHUNK = 1 << 19
"""Elements that are centred at a time: as many as stay in a cache."""


def part_moments(rows: Tensor) -> Tensor:
    """Mean and sum of squared deviations of what one device owns.

    Two passes over cached chunks: as exact as torch.var_mean, and ten times as fast on a CPU.
    """
    rows = rows.to(precise(rows.dtype))
    elements, channels = rows.numel(), rows.shape[1]
    if rows.is_cuda:
        variance, mean = torch.var_mean(rows, EVERYWHERE, correction=0)
        return torch.stack([mean, variance * (elements // channels)])
    mean = rows.mean(EVERYWHERE)
    if elements <= CHUNK:
        return torch.stack([mean, _squares(rows, mean)])
    found = torch.stack([mean, mean])
    step = max(1, CHUNK * channels // elements)
    for low in range(0, channels, step):
        span = slice(low, low + step)
        found[1, span] = _squares(rows[:, span], mean[span])
    return found


def _squares(rows: Tensor, mean: Tensor) -> Tensor:
    return (rows - mean.view(-1, 1, 1)).square_().sum(EVERYWHERE)


def merge(part: Tensor, links: Links, counts: Tensor, total: Tensor) -> Tensor:
    """Mean and variance of everything from everybody's part, ``counts`` by device and pair.

    It is worked out on the host: numbers that all devices must hold alike, and too few for a GPU.
    """

    def merged(parts: Tensor) -> Tensor:
        means, squares = parts.to(torch.float64, copy=True).unbind(1)
        mean = (means * counts).sum(0).div_(total)
        squares.addcmul_((means - mean).square_(), counts)
        return torch.stack([mean, squares.sum(0).div_(total)])

    host = to_host(part)
    return from_host(part, host.copy_(links.combine(host, merged)))


class Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), scaled and shifted per channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, *how: Any
    ) -> Tensor:
        ctx.save_for_backward(x, moments, weight)
        ctx.how = how
        eps, kind, groups = how
        if kind == BATCH:
            return fixed(x, moments, (weight, bias), eps)
        result = fixed(as_rows(x, kind, groups), moments, (None, None), eps).reshape(x.shape)
        if weight is not None:
            result = result * weight.view(1, -1, 1, 1)
        return (result if bias is None else result + bias.view(1, -1, 1, 1)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """``plain`` and ``product`` are sums of the gradient of the normalised input, alone and
        times that input: all that the gradients of mean and variance need."""
        x, moments, weight = ctx.saved_tensors
        eps, kind, groups = ctx.how
        if kind == BATCH:
            gx, flow, gw, gb = fixed_flow(grad, x, moments, weight, eps)
        else:
            rows = as_rows(x, kind, groups)
            normal = fixed(rows, moments, (None, None), eps).reshape(x.shape)
            gw, gb = (grad * normal).sum((0, 2, 3)), grad.sum((0, 2, 3))
            inner = (grad if weight is None else grad * weight.view(1, -1, 1, 1)).to(x.dtype)
            gx, product, plain = _fixed_backward(
                as_rows(inner, kind, groups), rows, moments, None, eps
            )
            assert gx is not None
            gx = gx.reshape(x.shape)
            flow = _flow(plain, product, torch.rsqrt(moments[1] + eps))
        by_bias = gb if ctx.needs_input_grad[3] else None
        if weight is None:
            return gx, flow, None, by_bias, None, None, None
        by_bias = None if by_bias is None else by_bias.to(weight.dtype)
        return gx, flow, gw.to(weight.dtype), by_bias, None, None, None


def fixed(
    rows: Tensor, moments: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> Tensor:
    mean, variance = moments.unbind()
    weight, bias = (_like(part, mean) for part in affine)
    result: Tensor = torch.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, eps)[0]
    return result


def _like(affine: Tensor | None, mean: Tensor) -> Tensor | None:
    """Weights as precise as statistics, which torch asks for: those of a model in half precision
    are kept in float32."""
    return affine if affine is None or affine.dtype == mean.dtype else affine.to(mean.dtype)


def fixed_flow(
    grad: Tensor,
    x: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    flows: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Of a batch norm with known statistics, the gradients of input (if it ``flows``), moments,
    weight and bias."""
    gx, gw, gb = _fixed_backward(grad, x, moments, weight, eps, flows=flows)
    inverse = (moments[1] + eps).rsqrt_()
    flow = _flow(gb, gw, inverse)
    if weight is None:
        return gx, flow, gw, gb
    return gx, flow.mul_(weight), gw.to(weight.dtype), gb.to(weight.dtype)


def _flow(plain: Tensor, product: Tensor, inverse: Tensor) -> Tensor:
    """Gradients of mean and variance, from sums of the gradient of the normalised input: alone,
    and times that input."""
    return torch.stack([plain, (product * inverse).mul_(0.5)]).mul_(inverse.neg())


def _fixed_backward(
    grad: Tensor,
    rows: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    flows: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    if rows.is_cuda:
        return _fixed_backward_by_hand(grad, rows, moments, weight, eps)
    mean, variance = moments.unbind()
    weight = _like(weight, mean)
    gx, gw, gb = torch.ops.aten.native_batch_norm_backward.default(
        grad.contiguous(), rows, weight, mean, variance, None, None, False, eps, [flows, True, True]
    )
    return gx if flows else None, gw.to(mean.dtype), gb.to(mean.dtype)


def _fixed_backward_by_hand(
    grad: Tensor, rows: Tensor, moments: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a GPU, where torch's own refuses maps in ``channels_last``, or of one channel,
    and is slow where channels are few."""
    mean, inverse = (part.view(1, -1, 1, 1) for part in (moments[0], torch.rsqrt(moments[1] + eps)))
    wide = grad.to(mean.dtype)
    gw, gb = ((rows - mean) * inverse * wide).sum((0, 2, 3)), wide.sum((0, 2, 3))
    scale = inverse if weight is None else inverse * weight.view(1, -1, 1, 1)
    return (wide * scale).to(rows.dtype), gw, gb


def normalize(
    x: Tensor, moments: Tensor, weight: Any, bias: Any, eps: float, kind: str, groups: int
) -> Tensor:
    how = (eps, kind, groups)
    result: Tensor = Normalize.apply(x, moments, weight, bias, *how)  # type: ignore[no-untyped-call]
    return result


class Moments(torch.autograd.Function):
    """Mean and variance of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        found = own_moments(rows)
        ctx.save_for_backward(rows, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return own_moments_flow(grad, *ctx.saved_tensors)


def own_moments(rows: Tensor) -> Tensor:
    """Mean and variance of rows that are all here."""
    found = part_moments(rows)
    found[1] /= _count(rows)
    return found


def own_moments_flow(grad: Tensor, rows: Tensor, found: Tensor) -> Tensor:
    """The gradient of rows from that of their mean and variance."""
    count = _count(rows)
    level, slope = spread(grad, found, grad.new_tensor([[1 / count], [2 / count]]))
    return torch.addcmul(as_column(level, rows), rows, as_column(slope, rows))


def _count(rows: Tensor) -> int:
    return max(1, rows.numel() // rows.shape[1])


def spread(grad: Tensor, moments: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """What flows to an element x: level + slope x. d mean = 1/n, d variance = 2 (x - mean)/n;
    ``share`` are 1/n and 2/n."""
    level, slope = (grad * share).unbind()
    return torch.addcmul(level, slope, moments[0], value=-1.0), slope


def as_column(numbers: Tensor, rows: Tensor) -> Tensor:
    """One number for each row of equal statistics, in the precision of the rows."""
    return numbers.to(rows.dtype).view(1, -1, 1, 1)


def moments(x: Tensor, kind: str, groups: int) -> Tensor:
    """All of it on one device; the steps of a program take it apart instead."""
    found: Tensor = Moments.apply(as_rows(x, kind, groups))  # type: ignore[no-untyped-call]
    return found


def running(
    moments: Tensor, mean: Tensor, variance: Tensor, momentum: Any, count: int, samples: int
) -> tuple[Tensor, Tensor]:
    """New running mean and (unbiased) variance; instance norms average theirs over samples."""
    factor = 1.0 / float(momentum) if isinstance(momentum, Tensor) else momentum
    now, wide = moments.unbind()
    wide = wide * (count / max(count - 1, 1))
    if now.numel() != mean.numel():
        now, wide = (part.view(samples, -1).mean(0) for part in (now, wide))
    return (
        torch.lerp(mean, now.to(mean.dtype), factor),
        torch.lerp(variance, wide.to(variance.dtype), factor),
    )


# ---- the same norms on one device, whole ------------------------------------------------------


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Training mode, with the new running statistics as results instead of side effects."""
    if is_plain(x):
        found = own_moments(x.detach())
        normal: Tensor = WholeNorm.apply(x, found, weight, bias, eps)  # type: ignore[no-untyped-call]
        return normal, *whole_running(found, mean, variance, momentum, x)
    if mean is None:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), None, None
    factor = 1.0 / float(momentum) if isinstance(momentum, Tensor) else momentum
    new_mean, new_variance = mean.detach().clone(), variance.detach().clone()
    result = F.batch_norm(x, new_mean, new_variance, weight, bias, True, factor, eps)
    return result, new_mean, new_variance


def is_plain(x: Tensor) -> bool:
    """Whether a batch norm of all of it is made here: torch's own takes three times as long on a
    CPU to find mean and variance. It refuses a single value per channel, in its own words."""
    return x.device.type == "cpu" and x.dim() == 4 and x.numel() > x.shape[1]


class WholeNorm(torch.autograd.Function):
    """A batch norm whose statistics are those of its own input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, found: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, found, weight)
        ctx.eps = eps
        return fixed(x, found, (weight, bias), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
        x, found, weight = ctx.saved_tensors
        gx, gw, gb = whole_flow(grad, x, found, weight, eps=ctx.eps, wanted=wanted)
        return gx, None, gw, gb, None


def whole_flow(
    grad: Tensor,
    x: Tensor,
    found: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, as far as they are wanted."""
    mean, variance = found.unbind()
    inverse = (variance + eps).rsqrt_()
    gx, gw, gb = torch.ops.aten.native_batch_norm_backward.default(
        grad.contiguous(), x, _like(weight, mean), None, None, mean, inverse, True, eps, wanted
    )
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        gx if wanted[0] else None,
        gw.to(dtype) if wanted[1] else None,
        gb.to(dtype) if wanted[2] else None,
    )


def whole_running(
    found: Tensor, mean: Tensor | None, variance: Any, momentum: Any, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """New running statistics of a norm of all there is, if it has any."""
    if mean is None:
        return None, None
    return running(found, mean, variance, momentum, _count(x), 1)


def instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if mean is not None:
        mean, variance = mean.detach().clone(), variance.detach().clone()
    result = F.instance_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return result, mean, variance


def group_norm(x: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


NORMS: dict[str, Callable[..., Any]] = {
    f"terrazzo.{function.__name__}": function
    for function in (batch_norm, instance_norm, group_norm, moments, normalize, running)
}

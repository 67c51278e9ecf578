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
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.runtime.links import Links


@dataclass(frozen=True)
class Moments:
    """Statistics of everything: mean and sum of squared deviations, over ``count`` elements."""

    mean: Tensor
    m2: Tensor
    count: int

    @property
    def variance(self) -> Tensor:
        return self.m2 / self.count

    @property
    def unbiased(self) -> Tensor:
        return self.m2 / max(self.count - 1, 1)


def as_rows(x: Tensor, op: str, groups: int) -> Tensor:
    """The input with equal statistics along dimension 1, as a batch norm sees it."""
    if op == "terrazzo.batch_norm":
        return x
    samples, channels, height, width = x.shape
    rows = channels if op == "terrazzo.instance_norm" else groups
    return x.reshape(1, samples * rows, channels // rows * height, width)


def measure(rows: Tensor, links: Links, counts: Sequence[int]) -> Moments:
    """Statistics over what all devices own; ``rows`` is what this one owns (maybe nothing)."""
    exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
    pairs = rows.shape[1]
    if counts[links.device]:
        variance, mean = torch.var_mean(rows.to(exact), (0, 2, 3), correction=0)
        own = torch.stack([mean, variance * counts[links.device]])
    else:
        own = torch.zeros(2, pairs, dtype=exact, device=rows.device)
    parts = links.gather(own).double()
    weights = torch.tensor(counts, dtype=torch.float64, device=rows.device).unsqueeze(1)
    total = sum(counts)
    mean = (parts[:, 0] * weights).sum(0) / total
    m2 = (parts[:, 1] + weights * (parts[:, 0] - mean) ** 2).sum(0)
    return Moments(mean.to(exact), m2.to(exact), total)


def normalize(
    rows: Tensor, moments: Moments, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> Tensor:
    result: Tensor = torch.native_batch_norm(
        rows, *affine, moments.mean, moments.variance, False, 0.0, eps
    )[0]
    return result


def running(
    old: tuple[Tensor, Tensor], moments: Moments, momentum: float | Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """New running mean and variance; instance norms average theirs over the samples."""
    factor = 1.0 / float(momentum) if isinstance(momentum, Tensor) else momentum
    mean, variance = moments.mean, moments.unbiased
    if mean.numel() != old[0].numel():
        mean, variance = (part.view(samples, -1).mean(0) for part in (mean, variance))
    return tuple(  # type: ignore[return-value]
        before * (1.0 - factor) + now.to(before.dtype) * factor
        for before, now in zip(old, (mean, variance), strict=True)
    )


# ---- the same norms on one device, whole ------------------------------------------------------


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Training mode, with the new running statistics as results instead of side effects."""
    if mean is None:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), None, None
    factor = 1.0 / float(momentum) if isinstance(momentum, Tensor) else momentum
    new_mean, new_variance = mean.detach().clone(), variance.detach().clone()
    result = F.batch_norm(x, new_mean, new_variance, weight, bias, True, factor, eps)
    return result, new_mean, new_variance


def instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if mean is not None:
        mean, variance = mean.detach().clone(), variance.detach().clone()
    result = F.instance_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return result, mean, variance


def group_norm(x: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


WHOLE_NORMS: dict[str, Callable[..., Any]] = {
    "terrazzo.batch_norm": batch_norm,
    "terrazzo.instance_norm": instance_norm,
    "terrazzo.group_norm": group_norm,
}

"""Losses inside the model, as cases: all reductions, weights, ignored and soft targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import MAP, Build, Case, H, W, fn, two
from torch import Tensor


def classes(count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, count, (2, H, W)),)


def ignored() -> tuple[Tensor, ...]:
    target = torch.randint(0, 4, (2, H, W))
    target[torch.rand(2, H, W) < 0.3] = -100
    return (target,)


def entropy(weight: Tensor | None = None, **options: Any) -> Build:
    return fn(
        lambda x, y: F.cross_entropy(x, y, None if weight is None else weight.to(x), **options)
    )


def pair(function: Callable[..., Tensor], **options: Any) -> Case:
    """A loss of two maps, by all three reductions at once."""
    return two(
        lambda x, y: tuple(
            function(x, y, reduction=reduction, **options) for reduction in ("mean", "sum", "none")
        )
    )


def _binary(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), **options)


def _binary_logits(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    more = {"pos_weight": torch.tensor([1.0, 2.0, 0.5, 3.0]).to(x).view(4, 1, 1)}
    plain = F.binary_cross_entropy_with_logits(x, y.sigmoid(), **options)
    return plain + F.binary_cross_entropy_with_logits(x, y.sigmoid(), **options, **more)


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)

LOSSES: dict[str, Case | Build] = {
    "cross entropy": Case(entropy(), extra=classes(4)),
    "cross entropy sum": Case(entropy(reduction="sum"), extra=classes(4)),
    "cross entropy none": Case(entropy(reduction="none"), extra=classes(4)),
    "cross entropy ignoring": Case(entropy(), extra=ignored),
    "cross entropy ignoring a class": Case(entropy(ignore_index=2), extra=classes(4)),
    "cross entropy weighted": Case(entropy(weight=WEIGHTS), extra=ignored),
    "cross entropy weighted sum": Case(entropy(weight=WEIGHTS, reduction="sum"), extra=ignored),
    "cross entropy smoothed": Case(entropy(label_smoothing=0.2), extra=ignored),
    "cross entropy smoothed weighted": Case(
        entropy(label_smoothing=0.1, weight=WEIGHTS), extra=ignored
    ),
    "cross entropy of probabilities": two(lambda x, y: F.cross_entropy(x, y.softmax(1))),
    "cross entropy of probabilities weighted": two(
        lambda x, y: F.cross_entropy(x, y.softmax(1), WEIGHTS.to(x), label_smoothing=0.1)
    ),
    "nll": Case(fn(lambda x, y: F.nll_loss(x.log_softmax(1), y)), extra=ignored),
    "mse": pair(F.mse_loss),
    "l1": pair(F.l1_loss),
    "smooth l1": pair(F.smooth_l1_loss, beta=0.5),
    "huber": pair(F.huber_loss, delta=0.7),
    "binary": pair(_binary),
    "binary logits": pair(_binary_logits),
    "soft margin": two(lambda x, y: F.soft_margin_loss(x, y.detach().sign())),
    "dice": two(lambda x, y: 1 - 2 * (x.sigmoid() * y).sum((2, 3)) / (x.exp() + y * y).sum((2, 3))),
    "divergence from many": Case(
        fn(lambda x, y: F.kl_div(x[:, :1].log_softmax(2), y.softmax(1), reduction="mean")),
        maps=(MAP, MAP),
        ends=True,
    ),
    "divergence": two(lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")),
}  # fmt: skip

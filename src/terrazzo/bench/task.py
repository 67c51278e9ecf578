"""The task: a model from one seed, a batch of noise, and a loss that every peer computes alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from terrazzo import zoo
from terrazzo.bench.cases import Case
from terrazzo.optimizers import lean
from terrazzo.zoo.convnext import RandomDepth

SEED = 20
RATE = 1e-3


def loss_of(output: Tensor) -> Tensor:
    """The mean square: a mean over images, so that parts of a batch add up."""
    return output.square().mean()


class WithLoss(nn.Module):
    """A model that ends in its loss: who spreads the model need not gather its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.model(x))


@dataclass(frozen=True, slots=True)
class Task:
    model: nn.Module
    images: Tensor

    @classmethod
    def make(cls, case: Case) -> Task:
        torch.manual_seed(SEED)
        model = without_chance(zoo.build(case.model).train())
        return cls(model, images_of(case))

    def part(self, images: range) -> Tensor:
        """Some of the images, without keeping the others."""
        return self.images[images.start : images.stop].clone()


def images_of(case: Case) -> Tensor:
    torch.manual_seed(SEED + 1)
    return torch.randn(case.batch, 3, case.side, case.side)


def without_chance(model: nn.Module) -> nn.Module:
    """Nothing is left out at random: peers draw differently, and could not be compared."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, RandomDepth):
            module.drop = 0.0
    return model


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return lean(torch.optim.SGD)(parameters, lr=RATE)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

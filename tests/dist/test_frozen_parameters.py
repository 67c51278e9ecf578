"""Single parameters that are frozen, or trained alone: the gradients of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, state, twin
from torch import Tensor, nn

import terrazzo as tz


def one_parameter_apart(options: dict[str, Any]) -> None:
    """Each parameter of each kind of layer frozen alone, and trained alone."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1),
        nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 6, 1), nn.Softplus(),
        nn.ConvTranspose2d(6, 4, 2, 2), nn.PReLU(4), nn.Conv2d(4, 5, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 5),
    ).double()  # fmt: skip
    x, y = batches(1)[0]
    models = twin(model), tz.parallelize(model, (x,), **options)
    names = [name for name, _ in model.named_parameters()]
    for others in (True, False):
        for name in names:
            for one in models:
                one.zero_grad()
                one.requires_grad_(others)
                dict(one.named_parameters())[name].requires_grad_(not others)
                F.cross_entropy(one(x), y).backward()
            found, expected = map(whole_gradients, models)
            assert found.keys() == expected.keys(), name
            assert_close(found, expected)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Also of weights that are cut: what plain descent changes."""
    before = state(model)
    torch.optim.SGD(model.parameters(), 1.0).step()
    return {
        name: tensor - before[name]
        for name, tensor in state(model).items()
        if not torch.equal(tensor, before[name])
    }


@pytest.mark.parametrize(
    "options", [{"layout": "tiles:2x1"}, {"groups": "one", "passes": 2}, {"layout": "channels"}],
    ids=["tiles", "passes", "channels"],
)  # fmt: skip
def test_one_parameter_frozen_or_trained_alone(options: dict[str, Any]) -> None:
    """A bias that was trained behind a frozen weight had a gradient of zero."""
    run_on(2, one_parameter_apart, options)

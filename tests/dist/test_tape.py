"""Steps of operators whose gradients are written out: no autograd, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import run_on
from plain import assert_close, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.runtime.steps import ComputeStep


class Block(nn.Module):
    """Layers as in MobileNetV2, with a residual; odd sizes, so that windows are cut at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)
        )
        self.body = nn.Sequential(
            nn.Conv2d(6, 6, 3, 1, 1, groups=6), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x)
        return found + self.body(found)


def compared(layout: str, groups: str, frozen: bool, known: bool) -> int:
    """One step beside plain PyTorch; gives how many steps went through autograd.

    ``known``: not with the loss, which is no operator of a layer.
    """
    calls = 0
    usual = ComputeStep._forward_by_autograd

    def counted(self: ComputeStep, run: Any) -> None:
        nonlocal calls
        calls += 1
        usual(self, run)

    torch.manual_seed(1)
    plain, x = Block().double(), torch.randn(2, 3, 17, 13, dtype=torch.float64)
    plain.first[0].weight.requires_grad_(not frozen)
    if not known:
        plain.body.append(nn.GELU())
    model = twin(plain)
    net = tz.parallelize(model, (x,), layout=layout, groups=groups)
    ComputeStep._forward_by_autograd = counted  # type: ignore[method-assign]
    try:
        for one in (plain, net):
            one(x).square().sum().backward()
    finally:
        ComputeStep._forward_by_autograd = usual  # type: ignore[method-assign]
    assert_close(_grads(model), _grads(plain))
    assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    return calls


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("layout", "groups"), [("samples", "one"), ("tiles:2x1", "each"), ("tiles:1x2", "one")]
)
def test_no_autograd_and_the_same_numbers(layout: str, groups: str, frozen: bool) -> None:
    assert run_on(2, compared, layout, groups, frozen, True) == [0, 0]


def test_a_step_with_another_operator_goes_through_autograd() -> None:
    assert all(calls > 0 for calls in run_on(2, compared, "samples", "one", False, False))

"""Boards' processors: other ways through convolutions, in every kind of layout, same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import run_on
from plain import assert_close, state, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.runtime.convolutions import backward, narrow, winograd

ROUNDING = 1e-5


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.1), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Softplus(),
        nn.Conv2d(8, 12, 3, padding=1), nn.Softplus(), nn.Conv2d(12, 8, 3),
        nn.Conv2d(8, 4, 5, stride=2, padding=2),
    )  # fmt: skip


def step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=10)
    model(x).square().mean().backward()
    optimizer.step()


def on_a_board(options: dict[str, Any], frozen: bool = False) -> int:
    """How many convolutions and gradients took fewer products; a weight may be ``frozen`` whose
    bias is trained."""
    used: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(winograd, name)

        def call(*given: Any) -> Tensor:
            used.append(name)
            found: Tensor = function(*given)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (winograd, backward):
            patch.setattr(module, "is_narrow", lambda: True)
        patch.setattr(winograd, "pays", lambda *_: True)
        for module in (narrow, backward):
            patch.setattr(module, "STRIP_BYTES", 1 << 11)
        for name in ("conv2d", "weight_gradient"):
            patch.setattr(winograd, name, counted(name))
        ours, x = model(), torch.randn(3, 3, 22, 17, generator=torch.Generator().manual_seed(1))
        ours[6].weight.requires_grad_(not frozen)
        exact = twin(ours).double()
        net = tz.parallelize(ours, (x,), **options)
        step(net, x)
    step(exact, x.double())
    found = state(net)
    assert_close(found, {n: t.to(found[n].dtype) for n, t in state(exact).items()}, limit=ROUNDING)
    assert "weight_gradient" in used
    return len(used)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {"layout": "tiles:2x1"}),
        (2, {"layout": "samples:2"}),
        (2, {"layout": "channels:2"}),
        (2, {"layout": "tiles:1x2", "groups": "one", "passes": 2}),
    ],
)
def test_fewer_products_change_nothing(devices: int, options: dict[str, Any]) -> None:
    assert min(run_on(devices, on_a_board, options)) >= 8


@pytest.mark.parametrize("layout", ["tiles:2x1", "channels:2"])
def test_with_a_frozen_weight(layout: str) -> None:
    assert min(run_on(2, on_a_board, {"layout": layout}, True)) >= 7


def rounded(layout: str) -> Tensor:
    """All weights after a step."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (winograd, backward):
            patch.setattr(module, "is_narrow", lambda: True)
        patch.setattr(winograd, "pays", lambda *_: True)
        ours, x = model(), torch.randn(3, 3, 22, 17, generator=torch.Generator().manual_seed(1))
        net = tz.parallelize(ours, (x,), layout=layout)
        step(net, x)
    return torch.cat([tensor.flatten() for tensor in state(net).values()])


def test_the_same_bits_from_run_to_run_on_all_devices() -> None:
    found = [*run_on(2, rounded, "tiles:2x1"), *run_on(2, rounded, "tiles:2x1")]
    assert all(torch.equal(one, found[0]) for one in found)

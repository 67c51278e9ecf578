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
    )  # fmt: skip


def step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=10)
    model(x).square().mean().backward()
    optimizer.step()


def on_a_board(options: dict[str, Any]) -> int:
    """How many convolutions and gradients took fewer products."""
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
        patch.setattr(narrow, "STRIP_BYTES", 1 << 11)
        for name in ("conv2d", "weight_gradient"):
            patch.setattr(winograd, name, counted(name))
        ours, x = model(), torch.randn(3, 3, 22, 17, generator=torch.Generator().manual_seed(1))
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

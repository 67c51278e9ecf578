"""A training of eight steps that loads little: the same on devices and in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
"""Of four steps each."""
EXAMPLE = torch.zeros(2, 2, 12, 12, dtype=torch.float64)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    return nn.Sequential(*layers).double()


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(8, *EXAMPLE.shape[1:], generator=draw, dtype=torch.float64))
    order = torch.Generator().manual_seed(5)
    return DataLoader(data, batch_size=2, shuffle=True, generator=order)


class Momentum:
    """Torch's own optimisers load a compiler at their first step, which takes seconds."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.kept = net, {}

    def step(self, x: Tensor) -> None:
        self.net(x).square().mean().backward()
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                assert parameter.grad is not None
                self.kept[name] = 0.9 * self.kept.get(name, 0.0) + parameter.grad
                parameter -= 0.1 * self.kept[name]
                parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        return self.kept

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.kept = dict(state)


def quiet() -> dict[str, Tensor]:
    """What all of it must come to."""
    net, data = model(), loader()
    momentum = Momentum(net)
    for _ in range(EPOCHS):
        for (x,) in data:
            momentum.step(x)
    return net.state_dict()

"""Plain PyTorch beside a net: small models, the same steps on both, compared tensor by tensor."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Named = Mapping[str, Tensor]
EXACT = 1e-10


def cnn(
    classes: int = 5, *, dtype: torch.dtype = torch.float64, bias: bool = True
) -> nn.Sequential:
    """Overlapping pool, BatchNorm in the tiled part, a global pool and a classifier.

    A bias before BatchNorm has a true gradient of zero. Adam divides the rounding that is left of
    it by its own size, so long runs with Adam do without those biases.
    """
    torch.manual_seed(0)
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 6, 3, 2, 1, bias=bias),
        norm1=nn.BatchNorm2d(6),
        act1=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, 2, 1),
        conv2=nn.Conv2d(6, 8, 3, padding=1, bias=bias),
        norm2=nn.BatchNorm2d(8),
        act2=nn.ReLU(),
        mean=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(8, classes),
    )
    return nn.Sequential(layers).to(dtype)


def batches(
    count: int, shape: tuple[int, ...] = (3, 3, 23, 17), *, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Pictures and classes, others at each step."""
    draw = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype),
            torch.randint(5, (shape[0],), generator=draw),
        )
        for _ in range(count)
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    after: Callable[[int], Any] = lambda step: None,
) -> list[float]:
    """An ordinary loop; gives the losses."""
    losses = []
    for step, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: Named, expected: Named, *, limit: float = EXACT) -> None:
    """Relative to each tensor's norm, or to a thousandth of the norm of all."""
    assert found.keys() == expected.keys()
    scale = sum(float(t.double().norm()) ** 2 for t in expected.values()) ** 0.5
    for name, right in expected.items():
        assert found[name].dtype == right.dtype, name
        assert found[name].shape == right.shape, name
        gap = float((found[name].double() - right.double()).norm())
        limit_here = limit * max(float(right.double().norm()), 1e-3 * scale)
        assert gap <= limit_here, f"{name} is off by {gap:.2e}, limit {limit_here:.2e}"


def bits(model: nn.Module) -> str:
    """A digest of the exact bits of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()

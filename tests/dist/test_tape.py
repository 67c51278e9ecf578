"""Steps of operators whose gradients are written out: no autograd, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import run_on
from plain import assert_close, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import UsageError
from terrazzo.runtime.steps import ComputeStep


class Block(nn.Module):
    """Layers as in MobileNetV2 and pools; sizes are odd, so that windows are cut at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)
        )
        self.body = nn.Sequential(
            nn.Conv2d(6, 6, 3, 1, 1, groups=6), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 6, 1)
        )
        self.last = nn.Sequential(
            nn.BatchNorm2d(6), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 6, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x)
        return self.last(found + self.body(found))  # type: ignore[no-any-return]


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
    plain, x = Block().double(), torch.randn(2, 3, 37, 29, dtype=torch.float64)
    plain.first[0].weight.requires_grad_(not frozen)
    if not known:
        plain.last.append(nn.GELU())
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


def bias_alone(groups: str) -> None:
    """Fine-tuning of biases, where devices add up channels and one of them adds the bias."""
    torch.manual_seed(2)
    layers = (nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1))
    plain = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 4, 1)).double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model, x = twin(plain), torch.randn(2, 4, 9, 7, dtype=torch.float64)
    net = tz.parallelize(model, (x,), layout="channels", groups=groups)
    for one in (plain, net):
        one(x).square().mean().backward()
        torch.optim.SGD(one.parameters(), 1.0).step()
    assert_close(net.state_dict(), plain.state_dict())


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


@pytest.mark.parametrize("groups", ["one", "each"])
def test_a_bias_is_added_once_also_where_only_biases_are_trained(groups: str) -> None:
    run_on(2, bias_alone, groups)


class Both(nn.Module):
    """Gives what it computes on the way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = self.first(x)
        return middle, self.second(middle)


def stepped(net: nn.Module, x: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    found = net(x)
    change(found[0] if isinstance(found, tuple) else found)
    (sum(map(torch.sum, found)) if isinstance(found, tuple) else found.square().sum()).backward()


@pytest.mark.parametrize(
    ("last", "change"),
    [
        (nn.Hardtanh(), lambda out: out.add_(1).div_(2)),
        (nn.ReLU6(), lambda out: out.sub_(3)),
        (nn.LeakyReLU(0.1), lambda out: out.neg_()),
        (nn.Identity(), lambda out: out.sigmoid_()),
    ],
)
def test_an_output_may_be_changed_in_place_where_pytorch_allows_it(
    last: nn.Module, change: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), last).double()
    model, x = twin(plain), 3 * torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for one in (plain, tz.parallelize(model, (x,))):
        stepped(one, x, change)
    assert_close(_grads(model), _grads(plain))


@pytest.mark.parametrize(
    "plain",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid()),
        Both(),
    ],
)
def test_an_output_that_is_needed_again_may_not_be_changed(plain: nn.Module) -> None:
    x, change = torch.randn(2, 3, 8, 8), torch.Tensor.zero_
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stepped(twin(plain), x, change)
    with pytest.raises(UsageError, match="was changed in place between"):
        stepped(tz.parallelize(plain, (x,)), x, change)


class Shifted(nn.Module):
    """Adds a parameter of a wider type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.shift
        return found


@pytest.mark.parametrize(
    ("plain", "shape"),
    [(Shifted(), (2, 3, 8, 8)), (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (3, 8, 8))],
)
def test_mixed_types_and_a_picture_alone(plain: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = twin(plain), torch.randn(shape)
    for one in (plain, tz.parallelize(model, (x,))):
        one(x).square().sum().backward()
    for name, grad in _grads(plain).items():
        found = _grads(model)[name]
        assert found.dtype == grad.dtype
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-5)

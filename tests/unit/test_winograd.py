"""Windows of 3x3 by fewer products: the same numbers, and no more rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo.runtime.convolutions import forward, narrow, recorded, winograd

aten = torch.ops.aten


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board's processor, to which sums cost nothing and little may be made on the way."""
    monkeypatch.setattr(winograd, "is_narrow", lambda: True)
    monkeypatch.setattr(winograd, "pays", lambda *_: True)
    monkeypatch.setattr(narrow, "STRIP_BYTES", 4 * 14 * 4 * 4)


def made(
    height: int, *, padding: tuple[int, int] = (1, 1), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A map, windows, a bias, and the gradient of a result."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, height, 14, dtype=dtype), torch.randn(6, 5, 3, 3, dtype=dtype)
    grad = torch.randn(2, 6, height + 2 * padding[0] - 2, 12 + 2 * padding[1], dtype=dtype)
    return x, weight, torch.randn(6, dtype=dtype), grad


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("height", [3, 4, 7, 8, 13])
@pytest.mark.parametrize("padding", [(1, 1), (0, 0), (2, 1), (0, 1)])
def test_results_and_gradients(height: int, padding: tuple[int, int]) -> None:
    x, weight, bias, grad = made(height, padding=padding)
    for one in (bias, None):
        found = winograd.conv2d(x, weight, one, padding)
        assert found.is_contiguous()
        expected = torch.conv2d(x, weight, one, padding=padding)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = winograd.weight_gradient(grad, x, weight, padding)
    _, expected, _ = aten.convolution_backward(
        grad, x, weight, [6], (1, 1), padding, (1, 1), False, (0, 0), 1, [False, True, False]
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("board")
def test_a_part_of_a_map_is_read_where_it_lies() -> None:
    x, weight, bias, _ = made(13, dtype=torch.float32)
    part = x[:, :, 2:11, 3:]
    found = forward.conv2d(part, weight, bias, padding=(0, 1))
    torch.testing.assert_close(found, torch.conv2d(part, weight, bias, padding=(0, 1)))


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, True), (True, False, False)])
def test_autograd_sees_one_node(needs: tuple[bool, ...]) -> None:
    *inputs, grad = made(9, dtype=torch.float32)
    leaves = [one.clone().requires_grad_(asked) for one, asked in zip(inputs, needs, strict=True)]
    result = recorded.conv2d(*leaves, [1, 1], [1], [1, 1])
    assert type(result.grad_fn).__name__ == "_RecordedBackward"
    result.backward(grad)
    plain = [one.clone().requires_grad_(asked) for one, asked in zip(inputs, needs, strict=True)]
    torch.conv2d(*plain, padding=1).backward(grad)
    for one, other in zip(leaves, plain, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "side"), [(32, 40), (128, 26)])
def test_rounding_is_no_worse_than_that_of_plain_convolutions(channels: int, side: int) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 1, channels, side, side)
    weight = torch.randn(channels, channels, 3, 3)
    exact = plain(x.double(), weight.double(), grad.double())
    result, gradient = plain(x, weight, grad)
    assert off(winograd.conv2d(x, weight, None, (1, 1)), exact[0]) < 1.5 * off(result, exact[0])
    found = winograd.weight_gradient(grad, x, weight, (1, 1))
    assert off(found, exact[1]) < 1.5 * off(gradient, exact[1])


def plain(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution of torch's, and the gradient of its weights."""
    weight.requires_grad_()
    result = torch.conv2d(x, weight, padding=1)
    (gradient,) = torch.autograd.grad(result, [weight], grad)
    weight.requires_grad_(False)
    return result.detach(), gradient


def off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def suits(x: Tensor, weight: Tensor, **other: Any) -> bool:
    given: dict[str, Any] = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, **other}
    return winograd.suits(x, weight, **given)


def test_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(1, 8, 6, 6), torch.zeros(8, 8, 3, 3)
    monkeypatch.setattr(winograd, "is_narrow", lambda: False)
    assert not suits(x, weight)
    monkeypatch.setattr(winograd, "is_narrow", lambda: True)
    assert suits(x, weight)
    assert suits(x[:, :, 1:5, 1:], weight)
    assert not suits(x.double(), weight.double())
    assert not suits(x.to(memory_format=torch.channels_last), weight)
    assert not suits(x[0], weight)
    assert not suits(x, torch.zeros(8, 8, 5, 5))
    assert not suits(x, weight[:, :4], groups=2)
    assert not suits(x, weight, stride=(2, 1))
    assert not suits(x, weight, dilation=(1, 2))
    with torch.autocast("cpu"):
        assert not suits(x, weight)


@pytest.mark.parametrize(
    ("shape", "channels", "does"),
    [
        ((1, 64, 208, 208), 32, True),
        ((1, 512, 26, 26), 256, True),
        ((6, 512, 13, 13), 1024, True),
        ((1, 1024, 13, 13), 512, False),  # windows are more than the map
        ((1, 32, 416, 416), 3, False),  # sums are more than products
        ((1, 256, 1, 400), 256, False),  # rows have no partner
    ],
)
def test_where_it_pays(shape: tuple[int, ...], channels: int, does: bool) -> None:
    weight = torch.empty(shape[1], channels, 3, 3, device="meta")
    assert winograd.pays(shape, weight, winograd.FORWARD) == does

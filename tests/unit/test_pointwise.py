"""Windows of one pixel: torch's numbers and gradients, whatever computes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from terrazzo.runtime.convolutions import pointwise
from terrazzo.runtime.convolutions.recorded import conv2d


@pytest.fixture(autouse=True)
def for_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor that oneDNN is the faster one on."""
    monkeypatch.setattr(pointwise, "_is_for_onednn", lambda: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def differentiated(function: object, *tensors: Tensor, how: tuple[object, ...]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = function(*leaves, *how)  # type: ignore[operator]
    result.square().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("shape", [(1, 24, 40, 30), (3, 8, 5, 7), (1, 4, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", [(1, 0, 1, 1), (2, 0, 1, 1), ((1, 1), (1, 1), (1, 1), 4)])
def test_like_torch(shape: tuple[int, ...], dtype: torch.dtype, how: tuple[object, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    weight = torch.randn(12, shape[1] // int(how[3]), 1, 1, dtype=dtype)  # type: ignore[call-overload]
    bias = torch.randn(12, dtype=dtype)
    found = differentiated(conv2d, x, weight, bias, how=how)
    expected = differentiated(torch.conv2d, x, weight, bias, how=how)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_only_where_torch_would_take_onednn() -> None:
    """Elsewhere torch has something slower for windows that are dilated."""
    pixel, window = torch.zeros(8, 8, 1, 1), torch.zeros(8, 8, 3, 3)
    large, small = torch.zeros(1, 8, 64, 64), torch.zeros(1, 8, 8, 8)
    assert pointwise.gaps_of(large, pixel, (1, 1)) == (2, 2)
    assert pointwise.gaps_of(small.expand(2, 8, 8, 8), pixel, (1, 1)) == (2, 2)
    for x, weight in [(large, window), (small, pixel), (large.double(), pixel), (large[0], pixel)]:
        assert pointwise.gaps_of(x, weight, (1, 1)) == (1, 1)

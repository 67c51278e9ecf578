"""Max pooling by rows: torch's numbers and torch's gradients, ties included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.runtime.pooling import max_pool2d


def both(x: Tensor, kernel: object, stride: object, padding: object, ceil: bool) -> None:
    one, other = (x.detach().clone().requires_grad_() for _ in range(2))
    found = max_pool2d(one, kernel, stride, padding, 1, ceil)
    expected = F.max_pool2d(other, kernel, stride, padding, 1, ceil)
    assert torch.equal(found, expected)
    seed = torch.randn_like(expected)
    found.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_like_torch(data: st.DataObject) -> None:
    draw = data.draw
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    shape = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        *(draw(st.integers(4, 11)) for _ in "hw"),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randint(-2, 3, shape).double()  # many ties
    both(x, kernel, stride, padding, draw(st.booleans()))


@pytest.mark.parametrize("kernel", [2, 3])
def test_on_views_other_orders_and_without_a_stride(kernel: int) -> None:
    x = torch.randn(2, 3, 14, 15, dtype=torch.float64)
    both(x[:, :, 1:-1, 2:], kernel, (), 0, False)
    both(x.contiguous(memory_format=torch.channels_last), kernel, 2, 1, False)


def test_not_a_number_is_passed_on() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 1, 1] = torch.nan
    assert torch.equal(max_pool2d(x, 2, 2, 0, 1, False).isnan(), F.max_pool2d(x, 2, 2).isnan())

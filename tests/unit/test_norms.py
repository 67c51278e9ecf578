"""The gradient of a norm with known statistics, as a GPU computes it: the same as torch's own."""

from __future__ import annotations

import pytest
import torch

from terrazzo.runtime.norms import _fixed_backward, _fixed_backward_by_hand, part_moments


@pytest.mark.parametrize("shape", [(3, 5, 7, 6), (1, 1, 9, 4), (2, 3, 1, 1)])
@pytest.mark.parametrize("weighted", [True, False])
def test_by_hand(shape: tuple[int, ...], weighted: bool) -> None:
    torch.manual_seed(0)
    rows, grad = torch.randn(shape, dtype=torch.float64) + 3, torch.randn(shape).double()
    moments = torch.rand(2, shape[1], dtype=torch.float64) + 0.5
    weight = torch.randn(shape[1], dtype=torch.float64) if weighted else None
    expected = _fixed_backward(grad, rows, moments, weight, 1e-3)
    found = _fixed_backward_by_hand(grad, rows, moments, weight, 1e-3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_by_hand_in_half_precision_sums_in_float32() -> None:
    torch.manual_seed(0)
    rows, grad = torch.randn(2, 3, 40, 50).bfloat16(), torch.randn(2, 3, 40, 50).bfloat16()
    moments = part_moments(rows) / torch.tensor([[1.0], [4000.0]])
    gx, gw, gb = _fixed_backward_by_hand(grad, rows, moments, None, 1e-5)
    right = _fixed_backward(grad.double(), rows.double(), moments.double(), None, 1e-5)
    assert (gx.dtype, gw.dtype, gb.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for one, other in zip((gw, gb), right[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)

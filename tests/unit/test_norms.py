"""Norms by our own hands: the same as torch's own."""

from __future__ import annotations

import pytest
import torch

from terrazzo.runtime.norms import (
    _fixed_backward,
    _fixed_backward_by_hand,
    batch_norm,
    fixed,
    fixed_flow,
    own_moments,
    part_moments,
)


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


def test_a_model_in_half_precision() -> None:
    """Statistics are kept in float32 there, results and gradients in the model's own precision."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 20, 30).bfloat16(), torch.randn(2, 3, 20, 30).bfloat16()
    weight, bias = torch.rand(3).bfloat16(), torch.rand(3).bfloat16()
    moments, wide = own_moments(x), x.float()
    result = fixed(x, moments, (weight, bias), 1e-3)
    right = fixed(wide, moments, (weight.float(), bias.float()), 1e-3)
    torch.testing.assert_close(result.float(), right, rtol=1e-2, atol=1e-2)
    found = fixed_flow(grad, x, moments, weight, 1e-3)
    expected = fixed_flow(grad.float(), wide, moments, weight.float(), 1e-3)
    assert [flow.dtype for flow in found] == [
        torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16,
    ]  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)
    entered = [part.clone().requires_grad_() for part in (x, weight, bias)]
    whole, *_ = batch_norm(*entered, None, None, 0.1, 1e-3)
    flows = torch.autograd.grad(whole, entered, grad)
    assert whole.dtype == torch.bfloat16 and all(flow.dtype == torch.bfloat16 for flow in flows)
    torch.testing.assert_close(whole.float(), right, rtol=1e-2, atol=1e-2)


def test_a_single_value_per_channel_is_refused_by_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norm(torch.zeros(1, 3, 1, 1), None, None, None, None, 0.1, 1e-5)

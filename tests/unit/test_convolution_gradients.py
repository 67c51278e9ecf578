"""Gradients of convolutions: those of torch, whichever way they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.runtime.convolution import _turned_padding, gradients

ONCE = ((1, 1), (1, 1))
"""Stride and dilation."""


def arguments(
    kernel: tuple[int, int], padding: tuple[int, int], steps: Any = ONCE, groups: int = 1
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    stride, dilation = steps
    x = torch.randn(2, 4, 13, 14, dtype=torch.float64)
    weight = torch.randn(6, 4 // groups, *kernel, dtype=torch.float64)
    result = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn_like(result)
    return (grad, x, weight, [6], stride, padding, dilation, False, (0, 0), groups)


@pytest.mark.parametrize(
    ("kernel", "padding"),
    [((3, 3), (1, 1)), ((3, 3), (0, 0)), ((2, 3), (1, 2)), ((4, 1), (3, 0)), ((5, 5), (2, 1))],
)
@pytest.mark.parametrize("wanted", [[True, True, True], [True, False, False], [False, True, False]])
def test_windows_that_step_by_one(
    kernel: tuple[int, int], padding: tuple[int, int], wanted: list[bool]
) -> None:
    given = arguments(kernel, padding)
    assert _turned_padding(*given) is not None
    expected = torch.ops.aten.convolution_backward(*given, wanted)
    for one, other, asked in zip(gradients(given, wanted), expected, wanted, strict=True):
        assert (one is not None) == asked
        if asked:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        arguments((3, 3), (1, 1), ((2, 1), (1, 1))),
        arguments((3, 3), (1, 1), ((1, 1), (1, 2))),
        arguments((3, 3), (1, 1), groups=2),
        arguments((3, 3), (3, 3)),
        arguments((1, 1), (0, 0)),
        arguments((13, 14), (1, 1)),
    ],
    ids=["stride", "dilation", "groups", "wide padding", "one pixel", "weights larger than maps"],
)
def test_others_are_left_to_torch(given: tuple[Any, ...]) -> None:
    assert _turned_padding(*given) is None
    expected = torch.ops.aten.convolution_backward(*given, [True, True, True])
    for one, other in zip(gradients(given, [True, True, True]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)

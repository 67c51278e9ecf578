"""Sizes that gaps are measured against: everything finite counts, nothing else does."""

from __future__ import annotations

import math

import pytest
import torch

from terrazzo.checking import row, size

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 4.0], 5.0),
        ([3.0, INF, -4.0], 5.0),
        ([NAN, 3.0, 4.0, -INF], 5.0),
        ([NAN, INF], 0.0),
        ([], 0.0),
    ],
)
def test_size_is_the_norm_of_what_is_finite(values: list[float], expected: float) -> None:
    assert size(torch.tensor(values)) == pytest.approx(expected)


def test_size_of_integers_and_views() -> None:
    assert size(torch.tensor([[3, 4]])) == pytest.approx(5)
    assert size(torch.tensor([[3.0, 9.0], [4.0, 9.0]])[:, 0]) == pytest.approx(5)


def test_an_infinity_on_both_sides_hides_no_gap() -> None:
    plain = {"weight": torch.tensor([INF, 3.0, 4.0])}
    spread = {"weight": torch.tensor([INF, 3.0, 4.5])}
    found = row("gradients", plain, spread, 1e-10)
    assert found.worst == pytest.approx(0.1)


def test_an_infinity_on_one_side_is_a_gap() -> None:
    plain, spread = {"weight": torch.tensor([3.0, 4.0])}, {"weight": torch.tensor([3.0, INF])}
    assert not row("gradients", plain, spread, 1e-10).worst <= 1e-10

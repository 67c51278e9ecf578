"""``tz.log`` takes numbers, and says so when it is given something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import terrazzo as tz
from terrazzo.errors import UsageError


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (torch.zeros(2, 3), r"\(2, 3\)"),
        (torch.zeros(0), r"\(0,\)"),
        (torch.zeros(1, dtype=torch.complex64), r"\(1,\)"),
        ("0.5", "str"),
        ([0.5], "list"),
        (None, "NoneType"),
        (1j, "complex"),
        (np.zeros(3), "ndarray"),
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused_by_name(value: Any, seen: str) -> None:
    with pytest.raises(UsageError, match=rf"tz\.log\(error=\.\.\.\) takes .* this is {seen}:"):
        tz.log(loss=1.0, error=value)


@pytest.mark.parametrize("step", ["3", 2.5, [1]])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(UsageError, match=rf"step=.* whole number.* {type(step).__name__}"):
        tz.log(step=step, loss=1.0)


@pytest.mark.parametrize(
    "value",
    [1, 0.5, True, float("nan"), torch.tensor(2.0), torch.ones(1, 1), np.float32(0.5), np.int64(3)],
    ids=repr,
)
def test_numbers_are_taken_also_where_nothing_is_recorded(value: Any) -> None:
    tz.log(loss=value)
    tz.log(step=4, loss=value)
    tz.log()

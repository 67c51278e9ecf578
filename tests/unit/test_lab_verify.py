"""Verification: what counts as right, and how it is said that something is not."""

from __future__ import annotations

import pytest

from terrazzo.errors import UsageError
from terrazzo.lab.faults import Fault
from terrazzo.lab.verify import Figure, Verification


def figure(seen: float, wanted: float | None = 7e9) -> Figure:
    return Figure("compute", "GFLOP/s", 1e9, seen, wanted, 0.1)


@pytest.mark.parametrize(
    ("seen", "ok"), [(7e9, True), (6.31e9, True), (7.69e9, True), (6.2e9, False), (7.8e9, False)]
)
def test_both_sides_of_the_tolerance(seen: float, ok: bool) -> None:
    assert figure(seen).ok is ok


def test_without_a_wish_nothing_is_wrong() -> None:
    assert figure(1.0, None).ok
    assert figure(1.0, 0.0).ok


def test_problems_name_the_device_and_both_numbers() -> None:
    found = Verification(("pi3-0", "pi3-1"), ((figure(7e9),), (figure(5e9),)), (figure(9e9),))
    assert not found.ok
    assert found.problems == (
        "pi3-1: compute 5 GFLOP/s, 7 asked for",
        "all devices: compute 9 GFLOP/s, 7 asked for",
    )
    assert Verification(("pi3-0",), ((figure(7e9),),)).ok


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("melt", {}, "no fault melt; there are cut, slow"),
        ("slow", {}, "slow needs a rate"),
        ("slow", {"value": -1.0}, "slow needs a rate"),
        ("cut", {"after_s": -1.0}, "after 0 s or later"),
        ("cut", {"at_step": 0}, "at step 1 or later"),
    ],
)
def test_faults_that_make_no_sense(kind: str, values: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Fault(kind, 0, **values)  # type: ignore[arg-type]

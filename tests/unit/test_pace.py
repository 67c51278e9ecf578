"""Who strays from the plan: the rule, on numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from terrazzo.runtime.pace import LONGEST_WINDOW, WARM_UP, WINDOW, Foreseen, Pace
from terrazzo.schedule.pace import LEAST_S, LIMIT, MOST, beside_others, slowness, strays

EXPECTED = (0.1, 0.2, 0.1)


def number(place: int) -> str:
    return f"device {place}"


def steps(
    *times: float, expected: Sequence[float] = EXPECTED, count: int = WINDOW, noise: float = 0.1
) -> list[tuple[float, ...]]:
    """Steps in which devices take so many times as long as expected, and a little more or less."""
    draw = random.Random(3)
    usual = [e * t for e, t in zip(expected, times, strict=True)]
    return [
        tuple(seconds * draw.uniform(1 - noise, 1 + noise) for seconds in usual)
        for _ in range(count)
    ]


def test_a_device_is_measured_beside_the_others() -> None:
    assert beside_others((0.2, 0.4, 0.4), EXPECTED) == pytest.approx([1.0, 1.0, 2.0])
    assert beside_others((0.1, 0.2, 0.05), EXPECTED) == pytest.approx([1.0, 1.0, 0.5])
    assert beside_others((0.1, 0.3), (0.1, 0.1)) == pytest.approx([1.0, 3.0])
    assert beside_others((0.1, 0.04), (0.1, 0.001)) == [pytest.approx(1.0), None]


def test_little_work_says_little() -> None:
    left_out = (0.3, 0.35, 0.11)  # nothing to compute but Python's part of each step
    assert beside_others((0.3, 0.35, 0.04), left_out)[2] is None
    assert strays(steps(1, 1, 0.3, expected=left_out), left_out) == ()
    (slow,) = strays(steps(1, 1, 5, expected=left_out), left_out)  # so slow that others wait for it
    assert (slow.device, slow.is_slow) == (2, True)


def test_all_as_slow_is_no_straying() -> None:
    assert strays(steps(3.0, 3.0, 3.0), EXPECTED) == ()


@pytest.mark.parametrize("times", [(1, 1, 2), (2, 1, 1), (5, 5, 10)])
def test_one_slow_device_is_found(times: tuple[float, ...]) -> None:
    (found,) = strays(steps(*times), EXPECTED)
    assert found.device == times.index(max(times))
    assert found.is_slow and found.rate == pytest.approx(0.5, rel=0.1)


def test_half_of_the_devices_may_be_slow() -> None:
    found = strays(steps(1, 2, 2, 1, expected=(0.1,) * 4), (0.1,) * 4)
    assert [one.device for one in found] == [1, 2]


def test_a_device_that_recovers_is_found_too() -> None:
    (found,) = strays(steps(1, 1, 0.5), EXPECTED)
    assert found.device == 2 and not found.is_slow
    (other,) = strays(steps(1, 0.5, expected=(0.1, 0.1)), (0.1, 0.1))  # of two, the other lags
    assert other.device == 0 and other.is_slow


def test_only_what_lasts_counts() -> None:
    few = int(MOST * WINDOW) - 1
    rows = steps(1, 1, 4, count=few) + steps(1, 1, 1, count=WINDOW - few)
    assert strays(rows, EXPECTED) == ()
    rows = steps(1, 1, 4, count=few + 1) + steps(1, 1, 1, count=WINDOW - few - 1)
    assert [one.device for one in strays(rows, EXPECTED)] == [2]
    assert strays(steps(1, 1, LIMIT * 0.95, noise=0.0), EXPECTED) == ()
    assert strays(steps(1, 1, LIMIT * 1.05, noise=0.0), EXPECTED) != ()


def test_very_short_steps_are_not_judged() -> None:
    short = tuple(e * LEAST_S for e in EXPECTED)
    assert strays(steps(1, 1, 4, expected=short), short) == ()


def test_slowness_is_what_a_profile_is_corrected_by() -> None:
    assert slowness(steps(2, 2, 4), EXPECTED) == pytest.approx((2, 2, 4), rel=0.1)
    idle = (0.1, 0.1, 0.001)
    assert slowness(steps(2, 3, 50, expected=idle), idle)[2] == pytest.approx(2, rel=0.1)


def heard(pace: Pace, rows: Sequence[Sequence[float]], foreseen: Foreseen) -> list[int]:
    """The numbers of the steps at which there was news."""
    return [number for number, row in enumerate(rows) if pace.hear(row, foreseen)]


def test_news_come_once_and_after_a_full_window() -> None:
    pace, foreseen = Pace(), Foreseen("graph", EXPECTED)
    rows = steps(1, 1, 2, count=60, noise=0.0)
    assert heard(pace, rows, foreseen) == [WARM_UP + WINDOW]  # one more: the plan is new
    assert "device 2 computes at 0.5" in pace.words(number) and "planned rate" in pace.words(number)
    assert heard(pace, steps(1, 1, 1, count=WINDOW), foreseen) == []
    assert pace.strays == ()
    assert len(heard(pace, steps(1, 2, 2, count=WINDOW), foreseen)) == 1


def test_without_a_prediction_the_first_steps_are_the_measure() -> None:
    pace, foreseen = Pace(), Foreseen("graph", None)
    assert heard(pace, steps(2, 1, 1, count=60), foreseen) == []
    assert len(heard(pace, steps(2, 1, 3, count=WINDOW), foreseen)) == 1
    assert "device 2" in pace.words(number) and "first steps" in pace.words(number)


def test_a_new_plan_begins_anew_and_takes_longer() -> None:
    pace = Pace()
    rows = steps(1, 1, 2, count=60)
    assert heard(pace, rows, Foreseen("graph", EXPECTED))
    pace.be_patient()
    (first,) = heard(pace, rows, Foreseen("graph", EXPECTED))
    assert first == WARM_UP + 2 * WINDOW
    for _ in range(20):
        pace.be_patient()
    assert heard(pace, rows * 20, Foreseen("graph", EXPECTED)) == [WARM_UP + LONGEST_WINDOW]


def test_a_stray_is_measured_by_itself_where_it_was_seen_before() -> None:
    """The others rest while they wait for it, and look faster than they are."""
    pace, foreseen = Pace(), Foreseen("graph", EXPECTED)
    heard(pace, steps(1.5, 1.5, 1.5, count=WINDOW + WARM_UP + 1, noise=0.0), foreseen)
    heard(pace, steps(0.75, 0.75, 3.0, count=WINDOW, noise=0.0), foreseen)
    assert [one.device for one in pace.strays] == [2]
    assert pace.strays[0].rate == pytest.approx(0.25)
    assert pace.slowness == pytest.approx((1, 1, 2))
    fresh = Pace()
    heard(fresh, steps(1.5, 1.5, 3.0, count=WINDOW + WARM_UP + 1, noise=0.0), foreseen)
    assert fresh.slowness == pytest.approx((1, 1, 2))


def test_only_steps_of_the_planned_graph_are_told() -> None:
    pace, foreseen = Pace(), Foreseen("graph", EXPECTED)
    pace.hear((0.0, 0.0, 0.0), foreseen)
    pace.worked("another", 1.0)
    assert pace.tell() == 0.0
    pace.worked("graph", 1.0)
    assert (pace.tell(), pace.tell()) == (1.0, 0.0)
    for _ in range(100):  # a step that one device has nothing to say about is not counted
        assert not pace.hear((0.1, 0.0, 0.4), foreseen)

"""A contest of plans: who has turns, how long, and who wins."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from terrazzo.runtime.contest import FAR, LEAST, MOST, SKIPPED, TURN_S, Contest


def held(contest: Contest, seconds: Sequence[float], *, cold: float = 1.0) -> list[int]:
    """Laps as long as each plan takes, ``cold`` times as long in those that do not count; gives
    the plans of all laps."""
    run: list[int] = []
    while not contest.is_over:
        plan = contest.current
        new = len(run) < SKIPPED or any(other != plan for other in run[-SKIPPED:])
        run.append(plan)
        contest.lap(seconds[plan] * (cold if new else 1.0))
        assert len(run) < 500
    return run


def turns(run: Sequence[int]) -> list[int]:
    return [plan for place, plan in enumerate(run) if not place or run[place - 1] != plan]


def test_the_fastest_wins_and_cold_laps_do_not_count() -> None:
    contest = Contest(4)
    run = held(contest, [4.0, 3.9, 3.8, 4.3], cold=3.0)
    assert contest.current == 2
    # The best two, and the first again, which was tried when all was cold.
    assert turns(run) == [0, 1, 2, 3, 2, 1, 0]
    assert contest.seconds == {0: 4.0, 1: 3.9, 2: 3.8, 3: 4.3}
    assert contest.laps == len(run) == 7 * (SKIPPED + LEAST)


def test_turns_of_short_steps_have_more_laps() -> None:
    run = held(Contest(2), [TURN_S / 100, TURN_S / 200])
    assert run.count(0) == 2 * (SKIPPED + MOST) and run.count(1) == 2 * (SKIPPED + MOST)


def test_what_is_far_behind_has_two_laps_that_count() -> None:
    run = held(Contest(3), [10.0, FAR * 10.5, 11.0])
    assert run.count(1) == SKIPPED + 2 and run.count(2) == SKIPPED + LEAST
    assert turns(run) == [0, 1, 2]  # nobody is close to the first


@pytest.mark.parametrize(("saved", "winner"), [(0.002, 0), (0.03, 1)])
def test_another_plan_must_save_something(saved: float, winner: int) -> None:
    contest = Contest(2)
    held(contest, [5.0, 5.0 * (1 - saved)])
    assert contest.current == winner


def test_one_lap_that_was_disturbed_decides_nothing() -> None:
    contest = Contest(2)
    for number in range(2 * 2 * (SKIPPED + LEAST)):
        disturbed = number % 5 == SKIPPED  # the first that counts in every turn
        contest.lap((9.0 if contest.current else 10.0) * (1.5 if disturbed else 1.0))
    assert contest.is_over and contest.current == 1


def test_the_second_turn_judges_those_that_were_cold() -> None:
    """All of the first plan's first turn is slow, as in a new process; the second turn is not."""
    contest = Contest(2)
    while not contest.is_over:
        first = contest.laps < SKIPPED + LEAST
        contest.lap(12.0 if first else (10.0 if contest.current == 0 else 10.3))
    assert contest.current == 0


def test_noise_costs_little() -> None:
    """With steps that scatter by 5 %, what is chosen is within 2 % of the best nearly always."""
    draw, losses = random.Random(0), []
    for _ in range(300):
        seconds = [2.0 * draw.uniform(0.96, 1.04) for _ in range(5)]
        contest = Contest(5)
        while not contest.is_over:
            contest.lap(seconds[contest.current] * draw.gauss(1.0, 0.05))
        losses.append(seconds[contest.current] / min(seconds))
    losses.sort()
    assert losses[150] < 1.005 and losses[285] < 1.04


def test_nobody_to_compete_with() -> None:
    assert Contest(1).is_over

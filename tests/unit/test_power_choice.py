"""Foretelling and choosing power modes. Boards are simulated: regression tests, not evidence."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.boards.family import KINDS, drawn_workload
from terrazzo.errors import HelperGone, KnobError, PowerError, UsageError
from terrazzo.power.explorer import next_mode, spread_out
from terrazzo.power.least_squares import not_negative
from terrazzo.power.panel import all_modes
from terrazzo.power.predictor import Predictor
from terrazzo.power.selector import (
    EDP,
    ENERGY,
    TIME,
    Goal,
    Option,
    choose,
    differs,
    pareto,
)
from terrazzo.power.tuner import MOST_MODES, thinned, tune
from terrazzo.records.modes import Measured, Mode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from power_accuracy import LIMITS, SimulatedBench, WarmingBench, accuracy, trial

SEEDS = range(3)
"""Below 100: those that may be looked at."""


@pytest.mark.parametrize("count", [15, 50])
def test_modes_that_were_not_shown_are_foretold_on_boards_never_seen(count):
    """The short version of tools/power_accuracy.py."""
    most_power, most_time = LIMITS[count]
    for kind in KINDS:
        _, power, times = accuracy(kind, count, SEEDS, most=40)
        assert np.median(power) < most_power, kind
        assert np.median(times) < most_time, kind


def test_a_reference_of_the_same_board_makes_up_for_measurements():
    """Eight modes of a new workload, with and without forty of another one."""
    alone, helped = [], []
    for seed in range(6):
        bench, other = SimulatedBench("desktop", seed), SimulatedBench("desktop", seed)
        other.workload = drawn_workload(other.board, seed + 40)
        modes = all_modes(bench.knobs)
        many = [other.measure(mode, settled=True) for mode in spread_out(modes, bench.knobs, 40)]
        rows = [bench.measure(mode, settled=True) for mode in spread_out(modes, bench.knobs, 8)]
        asked = modes[::5]
        true = np.array([bench.truth(mode)[1] for mode in asked])
        reference = Predictor(many, bench.knobs)
        for errors, told in ((alone, None), (helped, reference)):
            found = Predictor(rows, bench.knobs, reference=told).at(asked)
            errors.append(float(np.median(np.abs(found.power_w / true - 1))))
    assert np.median(helped) < 0.9 * np.median(alone)


def test_doubts_are_neither_empty_nor_boundless():
    bench = SimulatedBench("jetson", 1)
    modes = all_modes(bench.knobs)
    rows = [bench.measure(mode, settled=True) for mode in spread_out(modes, bench.knobs, 30)]
    asked = modes[:: len(modes) // 60]
    told = Predictor(rows, bench.knobs).at(asked)
    true = np.array([bench.truth(mode) for mode in asked])
    for found, doubt, column in (
        (told.step_s, told.time_doubt, 0),
        (told.power_w, told.power_doubt, 1),
    ):
        score = np.abs(np.log(found / true[:, column])) / doubt
        assert np.mean(score < 2) > 0.85
        assert np.median(doubt) < 0.2


def test_a_disturbed_measurement_is_left_out():
    bench = SimulatedBench("desktop", 0)
    modes = all_modes(bench.knobs)
    rows = []
    for mode in spread_out(modes, bench.knobs, 30):
        step_s, power_w = bench.truth(mode)
        rows.append(Measured(mode, step_s, power_w))
    rows[17] = replace(rows[17], step_s=rows[17].step_s * 1.6)
    assert rows[17] in Predictor(rows, bench.knobs).left_out


def test_too_few_measurements_are_refused():
    bench = SimulatedBench("pi", 0)
    rows = [bench.measure(m, settled=True) for m in all_modes(bench.knobs)[:3]]
    with pytest.raises(PowerError, match="at least 4"):
        Predictor(rows, bench.knobs)


def test_tuning_holds_what_must_hold():
    done = [trial(KINDS[turn % 3], turn, turn) for turn in range(4)]
    assert not any(one.violated or one.refused for one in done)
    assert np.median([one.loss for one in done]) < 0.05


class Watched(WarmingBench):
    """Keeps what was measured, in its order."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.rows: list[Measured] = []

    def measure(self, mode: Mode, *, settled: bool) -> Measured:
        self.rows.append(super().measure(mode, settled=settled))
        return self.rows[-1]


def test_under_a_limit_of_power_nothing_far_above_it_is_tried():
    """What the limit is for may be a supply that can't carry the highest modes."""
    for kind in ("pi", "desktop"):
        bench = Watched(kind, 3)
        limit_w = 0.6 * bench.truth(all_modes(bench.knobs)[-1])[1]
        first = all_modes(bench.knobs)[0]
        found = tune(bench, Goal(TIME, max_power_w=limit_w), also=[first], most=20)
        assert bench.rows[0].mode == first  # the state as it was, whatever it draws
        assert max(row.power_w for row in bench.rows) < 1.25 * limit_w
        assert 0.9 * limit_w < found.choice.best.power_w < limit_w


def test_a_slowdown_is_against_a_mode_that_was_measured():
    bench = Watched("desktop", 1)
    found = tune(bench, Goal(ENERGY, max_slowdown=1.3), most=20)
    quick = min(found.options, key=lambda o: o.step_s)
    assert quick.is_measured
    best = found.choice.best
    assert bench.truth(best.mode)[0] < 1.3 * bench.truth(quick.mode)[0]
    unsure = replace(FAST, time_doubt=0.2)
    even = replace(EVEN, time_doubt=0.01)
    assert choose([FAST, even], Goal(ENERGY, max_slowdown=1.6)).best is even
    assert choose([unsure, even], Goal(ENERGY, max_slowdown=1.6)).best is unsure


def test_a_knob_that_does_not_move_is_left_alone():
    class Stiff(SimulatedBench):
        def measure(self, mode, *, settled):
            values = dict(mode.values)
            if values.get("mem_hz", top) != top:
                refusal = KnobError("something else holds it")
                refusal.knob = "mem_hz"
                raise refusal
            row = super().measure(Mode.of(values | {"mem_hz": top}), settled=settled)
            return replace(row, mode=mode)

    bench = Stiff("jetson", 1)
    top = bench.knobs["mem_hz"][-1]
    found = tune(bench, Goal(ENERGY), most=14)
    assert found.left_alone == ("mem_hz",)
    assert len(found.rows) >= 12
    assert all("mem_hz" not in row.mode.knobs for row in found.rows)


def test_a_mode_the_device_refuses_is_left_out():
    class Stubborn(SimulatedBench):
        def measure(self, mode, *, settled):
            if mode["cores"] == 4:
                raise KnobError("core 3 stays off")
            return super().measure(mode, settled=settled)

    found = tune(Stubborn("pi", 0), Goal(TIME), most=14)
    assert 0 < len(found.refused) < 10
    assert found.choice.best.mode["cores"] == 3


def test_a_helper_that_is_gone_ends_the_search():
    class Gone(SimulatedBench):
        def measure(self, mode, *, settled):
            if self.count == 10:
                raise HelperGone("the power helper has gone")
            return super().measure(mode, settled=settled)

    with pytest.raises(HelperGone):
        tune(Gone("pi", 10), Goal(TIME), most=14)


def test_a_device_that_takes_no_more_modes_is_not_asked_for_ever():
    class Stuck(SimulatedBench):
        asked = 0

        def measure(self, mode, *, settled):
            if self.count >= 12 and not settled:
                self.asked += 1
                raise KnobError("too hot")
            return super().measure(mode, settled=settled)

    bench = Stuck("jetson", 10)
    found = tune(bench, Goal(ENERGY), most=50)
    assert bench.asked == 5
    assert found.choice.best.is_measured


def test_too_many_modes_are_thinned_and_the_highest_kept():
    knobs = {"a": list(range(1, 41)), "b": list(range(1, 31)), "c": list(range(1, 32))}
    modes = thinned(knobs)
    assert len(modes) <= MOST_MODES
    assert Mode.of({"a": 40, "b": 30, "c": 31}) in modes


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_least_squares_without_negative_answers(seed):
    random = np.random.default_rng(seed)
    table, wanted = random.normal(size=(12, 5)), random.normal(size=12)
    found = not_negative(table, wanted)
    slope = table.T @ (wanted - table @ found)
    assert (found >= 0).all()
    assert (slope < 1e-7).all()  # nothing would gain by becoming larger
    assert np.abs(slope * found).max() < 1e-7  # nor by any change of what is not zero


# ---- the selector --------------------------------------------------------------------------------


def option(step_s: float, power_w: float, doubt: float = 0.001, **more) -> Option:
    mode = Mode.of({"step": step_s, "power": power_w})
    return Option(mode, step_s, power_w, doubt, doubt, **more)


FAST, EVEN, SLOW = option(1.0, 20.0), option(1.5, 10.0), option(4.0, 6.0)


@pytest.mark.parametrize(
    ("goal", "best"),
    [
        (Goal(TIME), FAST),
        (Goal(ENERGY), EVEN),
        (Goal(EDP), FAST),
        (Goal(TIME, max_power_w=15), EVEN),
        (Goal(TIME, max_power_w=7), SLOW),
        (Goal(ENERGY, max_slowdown=1.2), FAST),
        (Goal(ENERGY, max_step_s=1.2), FAST),
    ],
)
def test_the_best_mode_that_holds(goal, best):
    if goal.objective == EDP:
        assert min((FAST, EVEN, SLOW), key=goal.value) is FAST
    assert choose([SLOW, FAST, EVEN], goal).best is best


def test_what_must_hold_does_so_with_confidence():
    unsure = option(1.0, 9.5, doubt=0.1)
    assert choose([unsure, SLOW], Goal(TIME, max_power_w=10, confidence=0.6)).best is unsure
    assert choose([unsure, SLOW], Goal(TIME, max_power_w=10, confidence=0.98)).best is SLOW


def test_modes_closer_than_the_error_are_not_ranked():
    one, other = option(1.0, 10.0, doubt=0.01), option(1.0, 10.05, doubt=0.01)
    found = choose([other, one, SLOW], Goal(ENERGY))
    assert found.best is one
    assert found.alike == (other,)
    assert "not ranked" in found.words
    measured = replace(other, is_measured=True)
    assert choose([one, measured, SLOW], Goal(ENERGY)).best is measured
    assert not differs(one, other, Goal(ENERGY))
    assert differs(one, SLOW, Goal(ENERGY))


def test_a_goal_nothing_meets_is_refused_with_numbers():
    with pytest.raises(PowerError, match=r"at most 5\.00 W on average \(the least is 6\.00 W"):
        choose([FAST, SLOW], Goal(ENERGY, max_power_w=5))
    with pytest.raises(PowerError, match=r"the fastest takes 1\.00 s"):
        choose([FAST, SLOW], Goal(ENERGY, max_step_s=0.5))


@pytest.mark.parametrize(
    "wrong", [{"objective": "speed"}, {"max_slowdown": 0.9}, {"confidence": 1.0}]
)
def test_goals_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        Goal(**wrong)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 50)), min_size=1, max_size=30))
def test_nothing_on_the_front_is_beaten(figures):
    options = [option(step_s, power_w) for step_s, power_w in figures]
    front = pareto(options)
    for one in front:
        assert not any(o.step_s < one.step_s and o.step_j < one.step_j for o in options)
    for other in options:
        assert any(o.step_s <= other.step_s and o.step_j <= other.step_j for o in front)


def test_the_next_mode_is_one_that_could_change_the_choice():
    bench = SimulatedBench("jetson", 2)
    modes = all_modes(bench.knobs)
    rows = [bench.measure(mode, settled=True) for mode in spread_out(modes, bench.knobs, 12)]
    told = Predictor(rows, bench.knobs).at(modes)
    known = {row.mode for row in rows}
    best = min(row.step_j for row in rows)
    found = next_mode(told, Goal(ENERGY), best=best, known=known)
    assert found not in known
    middle = float(np.median(told.step_j))
    place = modes.index(found)
    assert told.step_j[place] < middle
    low = next_mode(told, Goal(TIME, max_power_w=6.0), best=None, known=known)
    assert told.power_w[modes.index(low)] < 7.0
    assert next_mode(told, Goal(ENERGY), best=best / 100, known=known) is None

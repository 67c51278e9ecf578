"""Rivals: plans near the best by prediction, as far as devices have the memory to try them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import regrouped
from terrazzo.planner.limits import within
from terrazzo.planner.rivals import MORE, MOST, NEAR, ROOMY, rivals
from terrazzo.planner.search import BORDERS, MEMORY, Found, search, tidy
from terrazzo.records import Layout, Plan
from terrazzo.schedule import lower

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile
from test_search import deep, mixed


def found() -> Found:
    return search(mixed(6), profile(4))


def seconds(plan: Plan) -> float:
    return predict(lower(mixed(6), plan), profile(4), memory=False).step_s


def test_they_are_near_and_the_nearest() -> None:
    one = found()
    others = rivals(mixed(6), one, None)
    assert 0 < len(others) <= MOST and one.best not in others
    times = [seconds(other.plan) for other in others]
    assert times == sorted(times) and times[-1] <= (1 + NEAR) * one.best.prediction.step_s
    left = [t for t in one.rejected if t not in others]
    assert all(t.prediction.step_s >= times[-1] for t in left) or len(others) < MOST


def test_nothing_is_tried_that_a_device_could_break_down_under() -> None:
    one = found()
    need = one.best.prediction.memory_bytes
    roomy = [int(10 * n / ROOMY) for n in need]
    full = rivals(mixed(6), one, [int(1.2 * n) for n in need])
    assert full and all(
        within(
            predict(lower(mixed(6), p.plan), profile(4)).memory_bytes, [int(MORE * n) for n in need]
        )
        for p in full
    )
    assert len(rivals(mixed(6), one, roomy)) >= len(full)
    heavy = replace(
        one,
        rejected=tuple(
            replace(t, prediction=replace(t.prediction, memory_bytes=tuple(2 * n for n in need)))
            for t in one.rejected
        ),
    )
    assert rivals(mixed(6), heavy, need) == ()


def test_who_asks_for_the_least_memory_has_none() -> None:
    wishes = Wishes(profile=profile(4))
    one = wishes.search(mixed(6), 4)
    assert wishes.rivals(mixed(6), one)
    least = replace(wishes, objective=MEMORY)
    assert least.rivals(mixed(6), least.search(mixed(6), 4)) == ()
    alone = Wishes(profile=profile(1))
    assert alone.rivals(mixed(6), alone.search(mixed(6), 1)) == ()


def test_no_plan_is_there_twice_and_none_needs_more_than_there_is() -> None:
    for devices, batch in ((2, 1), (3, 6), (4, 6)):
        one = search(mixed(batch), profile(devices))
        plans = [one.best.plan, *(tried.plan for tried in one.rejected)]
        assert len(set(plans)) == len(plans)
        need = one.best.prediction.memory_bytes
        rooms = [int(1.02 * n) for n in need]
        for rival in rivals(mixed(batch), one, rooms):
            found = predict(lower(mixed(batch), rival.plan), profile(devices))
            assert within(found.memory_bytes, rooms)


def test_who_keeps_weights_whole_is_not_made_to_cut_them() -> None:
    one = search(deep(), profile(4))
    assert not lower(deep(), one.best.plan).homes
    cut = plan_graph(deep(), 4, layout="channels:4", groups="each")
    assert lower(deep(), cut).homes
    whole = plan_graph(deep(), 4, layout="tiles:1x4", groups="each")
    near = [replace(one.best, name=str(plan), plan=plan) for plan in (cut, whole)]
    found = replace(one, rejected=tuple(near))
    assert rivals(deep(), found, None) == (near[1],)
    others = replace(found, best=near[0], rejected=(near[1], one.best))
    assert rivals(deep(), others, None) == (near[1], one.best)


@pytest.mark.parametrize("latency_s", [1e-4, 1e-3, 2e-2])
def test_the_choice_is_no_slower_than_its_layouts_with_other_borders(latency_s: float) -> None:
    cluster = profile(4, latency_s=latency_s)
    best = search(deep(), cluster, layout=Layout.parse("tiles:2x2")).best
    assert best.plan.groups[0].layout == Layout.parse("tiles:2x2")
    for groups in BORDERS:
        other = tidy(regrouped(deep(), best.plan, groups))
        other_s = predict(lower(deep(), other), cluster, memory=False).step_s
        assert best.prediction.step_s <= other_s

"""Lanes: the stages of an input drawn over steps, for a terminal and for a page."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from terrazzo.feed.stalls import fed_steps
from terrazzo.report.lanes import Timeline, picture, rows, timeline

sys.path.insert(0, str(Path(__file__).parent))
from rehearsed import World, run

MS = 1e-3


def drawn_of(world: World, *, first: int, count: int) -> Timeline:
    steps = fed_steps(run(world, 40))
    chosen = steps[first : first + count]
    return timeline(
        [span for step in steps for span in step.spans],
        steps=[(number, step.begin_s) for number, step in enumerate(chosen, first + 1)],
        end_s=chosen[-1].end_s,
    )


def test_lanes_hold_what_was_done() -> None:
    world = World(loop_s=20 * MS, threads=1, fetch_s=60 * MS, prepare_s=30 * MS, workers=2)
    drawn = drawn_of(world, first=20, count=4)
    assert [lane.name for lane in drawn.lanes] == ["loop", "worker 0", "worker 1"]
    length_s = sum(piece.end_s - piece.begin_s for piece in drawn.lanes[0].pieces)
    assert length_s == pytest.approx(drawn.length_s), "the loop is always at something"
    steps, *text = rows(drawn, width=60)
    assert steps.split() == ["step", "21", "22", "23", "24"]
    assert all(len(row) == 60 for row in (steps, *text))
    assert "█" in text[0]
    assert "░" in text[0]
    assert text[1].count("▒") == pytest.approx(2 * text[1].count("━"), abs=6)
    markup = picture(drawn)
    assert markup.count("<rect") == sum(len(lane.pieces) for lane in drawn.lanes)
    assert markup.count("<line") == 3, "between steps"


def test_steps_are_told_apart_where_nothing_waits() -> None:
    """The loop is one bar then."""
    drawn = drawn_of(World(20 * MS, 1, 1 * MS, 1 * MS, workers=1), first=20, count=4)
    steps, loop, _ = rows(drawn, width=50)
    assert set(loop.split()[1]) == {"█"}
    places = [steps.index(str(number)) for number in (21, 22, 23, 24)]
    assert all(b - a == pytest.approx(10, abs=1) for a, b in pairwise(places))


def test_numbers_of_steps_that_have_no_room_are_left_out() -> None:
    drawn = drawn_of(World(20 * MS, 1, 1 * MS, 1 * MS), first=0, count=30)
    steps, *_ = rows(drawn, width=41)
    assert len(steps) == 41
    assert "1 2 3" not in steps.replace("  ", "")
    assert steps.split()[:2] == ["step", "1"]


def test_batches_made_in_the_loop() -> None:
    drawn = drawn_of(World(20 * MS, 1, 60 * MS, 30 * MS), first=1, count=2)
    assert [lane.name for lane in drawn.lanes] == ["loop", "in the loop"]

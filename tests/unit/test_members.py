"""Members of a run agree on who goes on: in every order of messages, failures and suspicions.

``TERRAZZO_EXPLORE=long`` walks the worlds of larger clusters with more failures to their end;
without it those are wandered through by chance.
"""

from __future__ import annotations

import os
import random
import sys
from itertools import combinations
from pathlib import Path

import pytest

from terrazzo.members import council
from terrazzo.members.council import Council, Decided, Promise, Seat
from terrazzo.members.view import View, goes_on

sys.path.insert(0, str(Path(__file__).parent))
from explorer import KNOWN, Budget, World, begin, explore, wander
from shortcuts import walk

LONG = os.environ.get("TERRAZZO_EXPLORE") == "long"


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("tie", [0, 2])
def test_two_groups_that_may_go_on_share_a_device(size: int, tie: int) -> None:
    members = tuple(range(size))
    view = View(0, members, tie % size)
    groups = [set(g) for count in range(size + 1) for g in combinations(members, count)]
    going = [group for group in groups if goes_on(group, view)]
    assert all(one & other for one in going for other in going)
    for group in groups:  # and one of two parts always may
        assert goes_on(group, view) != goes_on(set(members) - group, view)


def test_strangers_do_not_count() -> None:
    assert not goes_on({0, 7, 8, 9}, View(0, (0, 1, 2), 0))


def test_the_tie_moves_on_when_its_device_is_lost() -> None:
    view = View(3, (0, 1, 2, 3), 0)
    assert view.next([1, 2, 3]) == View(4, (1, 2, 3), 1)
    assert view.next([0, 3]) == View(4, (0, 3), 0)


QUICK: list[tuple[int, Budget]] = [
    (2, Budget(crashes=2, ticks=1)),
    (2, Budget(cuts=1, pauses=1, ticks=2)),
    (2, Budget(mistakes=2, ticks=1)),
    (2, Budget(guests=1, crashes=1)),
    (3, Budget(crashes=2)),
    (3, Budget(crashes=1, ticks=1)),
    (3, Budget(pauses=1)),
    (3, Budget(cuts=1)),
    (3, Budget(mistakes=1)),
    (3, Budget(hangs=1, ticks=1)),
    (3, Budget(cuts=1, crashes=1)),
    (3, Budget(hangs=1, crashes=1)),
    (4, Budget(crashes=1)),
]
SMALL = [*QUICK[:9], (3, Budget(hangs=1))]
"""All worlds of these are few enough to be walked without shortcuts."""
LARGE = [
    (3, Budget(cuts=2, ticks=1)),
    (3, Budget(crashes=1, pauses=1, ticks=1)),
    (3, Budget(mistakes=1, crashes=1, ticks=1)),
    (3, Budget(guests=1, crashes=1)),
    (3, Budget(hangs=1, cuts=1)),
    (4, Budget(hangs=1)),
    (4, Budget(crashes=2)),
    (4, Budget(cuts=1, crashes=1)),
    (3, Budget(guests=1, cuts=1)),
    (3, Budget(guests=1, hangs=1)),
    (4, Budget(cuts=2)),
    (5, Budget(crashes=1)),
]
HUGE = [(4, Budget(hangs=1, crashes=1)), (5, Budget(crashes=1, pauses=1)), (5, Budget(cuts=2))]
"""Nobody has walked these to their end."""


def told(case: tuple[int, Budget]) -> str:
    count, budget = case
    return f"{count}-" + "-".join(f"{name}{n}" for name, n in budget._asdict().items() if n)


@pytest.mark.timeout(240 if not LONG else 7200)
@pytest.mark.parametrize("case", QUICK + LARGE * LONG, ids=told)
def test_every_way_ends_well(case: tuple[int, Budget]) -> None:
    worlds, ends = walk(begin(*case), most=50_000_000 if LONG else 150_000)
    assert worlds > len(ends) > 0


def outcome(end: World) -> tuple[object, ...]:
    """What somebody sees of an end: who is where, and how far everybody got."""
    devices = [KNOWN[at] for at in end.devices]
    return (end.crashed, *((own.seat.view, own.seat.is_out, own.done) for own in devices))


@pytest.mark.parametrize("case", SMALL, ids=told)
def test_shortcuts_miss_no_end(case: tuple[int, Budget]) -> None:
    """And every world is walked that was before: ends where less has happened come on top."""
    first = begin(*case)
    _, all_ends = explore(first, most=150_000)
    _, ends = walk(first, most=150_000)
    assert set(map(outcome, all_ends)) <= set(map(outcome, ends))


@pytest.mark.parametrize("case", LARGE + HUGE, ids=told)
def test_ways_by_chance_end_well(case: tuple[int, Budget]) -> None:
    count, budget = case
    draw = random.Random(20)
    first = begin(count, budget._replace(ticks=2))
    assert all(wander(first, draw=draw) > count for _ in range(60))


# ---- the explorer would notice ----------------------------------------------------------------


def test_a_careless_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may go on without the others: two devices that lose each other both do."""
    import explorer

    explorer.react.cache_clear()
    monkeypatch.setattr(council, "goes_on", lambda some, view: bool(some))
    for way in explore, walk:
        with pytest.raises(AssertionError, match="two views"):
            way(begin(2, Budget(cuts=1)), most=10_000)
    explorer.react.cache_clear()


def test_forgotten_votes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer that does not ask what was accepted before decides a second time."""
    import explorer

    explorer.react.cache_clear()
    said = Council._hear_promise

    def deaf(self: Council, source: int, message: Promise) -> None:
        said(self, source, message._replace(accepted=None))

    monkeypatch.setattr(Council, "_hear_promise", deaf)
    with pytest.raises(AssertionError, match="two views"):
        walk(begin(3, Budget(cuts=2, ticks=1)), most=1_000_000)
    explorer.react.cache_clear()


def test_a_guest_is_let_in() -> None:
    guest = Council(Seat(2, View(-1, (), 0)))
    guest.hear(0, Decided(View(4, (0, 1), 0)))
    assert not guest.seat.is_out
    guest.hear(0, Decided(View(5, (0, 1, 2), 0)))
    assert guest.seat.view.members == (0, 1, 2)

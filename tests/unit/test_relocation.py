"""Weights that come to live elsewhere: every element arrives once, and stays where it can."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.geometry import Box
from terrazzo.schedule.homes import owners
from terrazzo.schedule.relocation import everywhere, relocation, rescue
from terrazzo.schedule.tiling import Boxes

SHAPE = (7, 5)
DEVICES = 4


@st.composite
def homes(draw: st.DrawFn) -> Boxes:
    """As weights live: cut along one dimension, each part with some devices, none left out."""
    if draw(st.booleans()):
        return everywhere(SHAPE, DEVICES)
    dim = draw(st.integers(0, 1))
    parts = draw(st.integers(2, DEVICES))
    ends = draw(
        st.lists(st.integers(1, SHAPE[dim] - 1), min_size=1, max_size=parts - 1, unique=True)
    )
    edges = [0, *sorted(ends), SHAPE[dim]]
    whole = Box.whole(SHAPE)
    boxes = [whole.replace(dim, span) for span in pairwise(edges)]
    rest = draw(
        st.lists(
            st.sampled_from([*boxes, Box.empty(2)]),
            min_size=DEVICES - len(boxes), max_size=DEVICES - len(boxes),
        )
    )  # fmt: skip
    return tuple(draw(st.permutations([*boxes, *rest])))


@given(homes(), homes())
def test_every_element_arrives_once_from_one_who_has_it(before: Boxes, after: Boxes) -> None:
    arrived = [np.zeros(SHAPE, int) for _ in range(DEVICES)]
    for route in relocation(before, after):
        assert before[route.source].contains(route.box)
        assert not route.box.is_empty
        arrived[route.destination][route.box.slices()] += 1
    for device, need in enumerate(after):
        wanted = np.zeros(SHAPE, int)
        wanted[need.slices()] = 1
        assert (arrived[device] == wanted).all()


@given(homes(), homes())
def test_nothing_travels_that_is_there(before: Boxes, after: Boxes) -> None:
    for route in relocation(before, after):
        if route.source != route.destination:
            here = before[route.destination].intersect(route.box)
            assert here.is_empty
            assert owners(before)[route.source].contains(route.box)


@given(homes())
def test_staying_sends_nothing(boxes: Boxes) -> None:
    assert all(route.source == route.destination for route in relocation(boxes, boxes))
    everybody = everywhere(SHAPE, DEVICES)
    assert all(route.source == route.destination for route in relocation(everybody, boxes))


@given(
    homes(),
    homes(),
    st.integers(1, 2),
    st.lists(st.sampled_from(range(DEVICES)), min_size=1, unique=True).map(sorted),
)
def test_what_is_left_is_rescued_from_copies(
    boxes: Boxes, wanted: Boxes, neighbours: int, alive: list[int]
) -> None:
    """Every needed element comes once, from somebody who has it; or all say whose is gone."""
    holders = [{(m - step) % DEVICES for step in range(neighbours + 1)} for m in alive]
    after = wanted[: len(alive)]
    try:
        found = rescue(boxes, range(DEVICES), holders, after)
    except LookupError as error:
        gone = {m for m in range(DEVICES) if boxes[m] == boxes[error.args[0]]}
        assert gone.isdisjoint(set().union(*holders))
        return
    for place, need in enumerate(after):
        filled = np.zeros(SHAPE, dtype=int)
        for route in found:
            if route.destination == place:
                assert route.member in holders[route.source]
                assert boxes[route.member] == route.have
                filled[route.box.slices()] += 1
        right = np.zeros(SHAPE, dtype=int)
        right[need.slices()] = 1
        assert (filled == right).all()

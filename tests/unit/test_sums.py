"""Sums of weight gradients: when one starts, and how much is left for the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn, ones

from terrazzo.graph.export import export
from terrazzo.planner.explicit import plan_graph
from terrazzo.schedule import lower
from terrazzo.schedule.sums import LEAST_BYTES, MOST_BYTES, Waiting, summed_bytes

ALL = (0, 1, 2)
SIZES = st.lists(st.integers(1, 2 * MOST_BYTES), min_size=1, max_size=60)


@given(SIZES)
def test_sums_become_smaller_and_the_last_one_is_small(sizes: list[int]) -> None:
    waiting = Waiting({ALL: sum(sizes)})
    started, largest = [], max(sizes)
    for size in sizes:
        if waiting.add(ALL, size):
            started.append(waiting.start(ALL))
    rest = waiting.bytes.get(ALL, 0)
    assert sum(started) + rest == sum(sizes)
    assert rest < LEAST_BYTES
    assert all(LEAST_BYTES <= one < MOST_BYTES + largest for one in started[:-1])


def test_a_model_of_many_small_weights_has_few_sums() -> None:
    size, count = 10_000, 1500  # 15 MB
    waiting = Waiting({ALL: size * count})
    started = [waiting.start(ALL) for _ in range(count) if waiting.add(ALL, size)]
    assert len(started) == 7
    assert started[0] >= MOST_BYTES > started[-1]


def test_circles_do_not_know_of_each_other() -> None:
    waiting = Waiting({(0, 1): 4 * MOST_BYTES, (2, 3): LEAST_BYTES})
    assert not waiting.add((0, 1), LEAST_BYTES)
    assert waiting.add((2, 3), LEAST_BYTES)
    assert waiting.start((2, 3)) == LEAST_BYTES and waiting.bytes == {(0, 1): LEAST_BYTES}


def test_weights_that_are_not_trained_are_not_waited_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False))
    graph = export(model, (ones(3, 3, 8, 8),)).graph
    program = lower(graph, plan_graph(graph, 3, layout="samples", groups="one"))
    arrays = set(program.arrays)
    assert summed_bytes(program, arrays) == {ALL: 4 * (8 * 3 * 9 + 4 * 8 * 9)}
    trained = {name for name in arrays if program.arrays[name].value != graph.nodes[0].refs[1]}
    assert summed_bytes(program, trained) == {ALL: 4 * 4 * 8 * 9}

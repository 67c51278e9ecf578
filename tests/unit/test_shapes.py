"""Moving elements around: any reshape, permutation, slice and padding of boxes against torch."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terrazzo.geometry import Box
from terrazzo.graph.rules import LOCAL, Letters, place, rule_for
from terrazzo.graph.rules.shapes import factors
from terrazzo.records import Graph, Layout, Node, Ref, Value
from terrazzo.runtime.operators import local_operator, whole_operator
from terrazzo.schedule.tiling import owned

steady = settings(derandomize=True, deadline=None, max_examples=150)
dims = st.lists(st.integers(1, 6), min_size=1, max_size=5)
layouts = st.sampled_from([Layout.tiles(2, 1), Layout.tiles((1, 0, 3), 2), Layout.tiles(4, 3)])


def no_site(shape: tuple[int, ...], box: Box) -> Any:
    raise AssertionError("moving elements draws no random numbers")


def check(op: str, shape: tuple[int, ...], axes: str, args: tuple[Any, ...], how: Layout) -> bool:
    """Whether a node is local; then its tiles must give the whole result."""
    x = torch.arange(prod(shape)).view(shape)
    node = Node(op, (Ref("x"), *args), ("y",))
    whole = whole_operator(op, node.args, ())([x], no_site)
    assume(whole.numel() > 0)
    values = {"x": Value("x", "node", shape, "int64")}
    values["y"] = Value("y", "node", tuple(whole.shape), "int64")
    graph = Graph(values, (node,), (), (), {})
    placement = place(node, graph, Letters("hw", {"x": axes, "y": ""}))
    if placement.role != LOCAL:
        return False
    rule = rule_for(op)
    assert rule is not None and rule.local is not None
    assert len(placement.axes) == whole.dim()
    made = torch.full_like(whole, -1)
    for box in owned(tuple(whole.shape), placement.axes, how):
        if not box.is_empty:
            local = rule.local(node, graph, box)
            (read,) = local.reads
            assert Box.whole(shape).contains(read.box)
            call = local_operator(local, [read.box], shape=tuple(whole.shape), box=box)
            made[box.slices()] = call([x[read.box.slices()]], no_site)
    assert torch.equal(made, whole)
    return True


def letters(data: st.DataObject, rank: int) -> str:
    """An h and a w somewhere, or only one of them."""
    found = ["."] * rank
    for letter, place_ in zip("hw", data.draw(st.permutations(range(rank)))[:2], strict=False):
        found[place_] = letter
    return "".join(found)


@steady
@given(dims, st.lists(st.integers(0, 9), max_size=4), layouts, st.data())
def test_reshapes(before: list[int], moves: list[int], layout: Layout, data: st.DataObject) -> None:
    """Merging neighbours, splitting, adding and dropping dimensions of one element."""
    after = list(before)
    for move in moves:
        at = move % max(len(after), 1)
        if move % 3 == 0 and at + 1 < len(after):
            after[at : at + 2] = [after[at] * after[at + 1]]
        elif move % 3 == 1 and after:
            part = next(d for d in (3, 2, 1) if after[at] % d == 0)
            after[at : at + 1] = [part, after[at] // part]
        else:
            after.insert(at, 1)
    check(
        "aten.reshape.default", tuple(before), letters(data, len(before)), (tuple(after),), layout
    )


@steady
@given(dims, dims)
def test_runs_of_a_reshape_have_equal_products(before: list[int], after: list[int]) -> None:
    after = [*after, prod(before)] if prod(after) == 1 else before[::-1]
    runs = factors(before, after)
    assert [i for left, _ in runs for i in left] == list(range(len(before)))
    assert [j for _, right in runs for j in right] == list(range(len(after)))
    assert all(prod(before[i] for i in a) == prod(after[j] for j in b) for a, b in runs)


@steady
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), layouts, st.data())
def test_permutations(shape: list[int], layout: Layout, data: st.DataObject) -> None:
    rank = len(shape)
    order = tuple(
        d - rank * data.draw(st.integers(0, 1)) for d in data.draw(st.permutations(range(rank)))
    )
    axes = letters(data, rank)
    assert check("aten.permute.default", tuple(shape), axes, (order,), layout)
    swap = (data.draw(st.integers(-rank, rank - 1)), data.draw(st.integers(-rank, rank - 1)))
    assert check("aten.transpose.int", tuple(shape), axes, swap, layout)


@steady
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), layouts, st.data())
def test_slices(shape: list[int], layout: Layout, data: st.DataObject) -> None:
    bound = st.integers(-11, 11) | st.none() | st.just(1 << 62)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    args = (dim, data.draw(bound), data.draw(bound), data.draw(st.integers(1, 4)))
    assert check("aten.slice.Tensor", tuple(shape), letters(data, len(shape)), args, layout)


@steady
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), layouts, st.data())
def test_selections_and_repeats(shape: list[int], layout: Layout, data: st.DataObject) -> None:
    """Local exactly where no letter is touched."""
    rank, axes = len(shape), letters(data, len(shape))
    dim = data.draw(st.integers(0, rank - 1))
    index = data.draw(st.integers(-shape[dim], shape[dim] - 1))
    local = check("aten.select.int", tuple(shape), axes, (dim, index), layout)
    assert local == (axes[dim] == "." and axes.strip(".") != "")
    more = data.draw(st.integers(0, 2))
    times = tuple(
        data.draw(st.lists(st.integers(1, 3), min_size=rank + more, max_size=rank + more))
    )
    local = check("aten.repeat.default", tuple(shape), axes, (times,), layout)
    assert local == all(n == 1 for n, a in zip(times[more:], axes, strict=True) if a != ".")

"""Geometry against brute force: boxes as sets of indices, windows as loops, torch as the judge."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.geometry import (
    Adaptive,
    Bilinear,
    Box,
    Nearest,
    Sliding,
    Span,
    Transposed,
    adjoint,
    cut,
    grid,
    transfers,
)
from terrazzo.geometry.box import clip, hull

Points = set[tuple[int, ...]]

steady = settings(derandomize=True, deadline=None)

numbers = st.integers(-4, 9)
spans = st.tuples(numbers, numbers)


def boxes(rank: int) -> st.SearchStrategy[Box]:
    return st.lists(spans, min_size=rank, max_size=rank).map(lambda found: Box(tuple(found)))


def points(box: Box) -> Points:
    return set(product(*(range(low, high) for low, high in box.spans)))


ranks = st.integers(0, 4)
pairs = ranks.flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))


# ---- boxes ------------------------------------------------------------------------------------


@steady
@given(pairs)
def test_boxes_are_sets_of_points(two: tuple[Box, Box]) -> None:
    one, other = two
    assert points(one.intersect(other)) == points(one) & points(other)
    assert one.contains(other) == (points(other) <= points(one))
    assert one.size == len(points(one)) and one.is_empty == (not points(one))
    assert (one == other) == (points(one) == points(other))


@steady
@given(pairs)
def test_hull_is_the_smallest_box_around_both(two: tuple[Box, Box]) -> None:
    one, other = two
    both = one.hull(other)
    assert both == other.hull(one) == hull(two, one.rank)
    assert points(one) | points(other) <= points(both)
    for dim, (low, high) in enumerate(both.spans):
        along = {point[dim] for point in points(one) | points(other)}
        assert not along or (min(along), max(along) + 1) == (low, high)


@steady
@given(pairs)
def test_within_moves_a_box_into_the_coordinates_of_another(two: tuple[Box, Box]) -> None:
    inner, outer = two[0].intersect(two[1]), two[1]
    moved = inner.within(outer)
    starts = [low for low, _ in outer.spans]
    expected = {tuple(i - s for i, s in zip(p, starts, strict=True)) for p in points(inner)}
    assert points(moved) == expected
    assert all(0 <= i < n for p in points(moved) for i, n in zip(p, outer.shape, strict=True))


@steady
@given(boxes(3), st.tuples(*[st.integers(0, 6)] * 3))
def test_clip_and_slices_read_what_lies_inside(box: Box, shape: tuple[int, ...]) -> None:
    inside = box.clip(shape)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = {
        int(whole[p]) for p in points(box) if all(0 <= i < n for i, n in zip(p, shape, strict=True))
    }
    assert set(whole[inside.slices()].flatten().tolist()) == seen


@steady
@given(boxes(3), st.integers(0, 2), spans)
def test_replace(box: Box, dim: int, span: Span) -> None:
    made = box.replace(dim, span)
    if not box.is_empty:
        expected = {(*p[:dim], i, *p[dim + 1 :]) for p in points(box) for i in range(*span)}
        assert points(made) == expected


def test_empty_boxes_are_equal_and_a_point_is_not_empty() -> None:
    assert Box(((3, 3), (0, 5))) == Box.empty(2) == Box(((0, 1), (4, 2)))
    assert Box.empty(2).shape == (0, 0) and str(Box(((1, 2), (0, 5)))) == "[1:2, 0:5]"
    assert Box(()).size == 1 and not Box(()).is_empty
    assert Box.whole((2, 3)).hull(Box.empty(2)) == Box.whole((2, 3))


@steady
@given(spans, st.integers(0, 6))
def test_clip_of_a_span(span: Span, extent: int) -> None:
    assert set(range(*clip(span, extent))) == set(range(*span)) & set(range(extent))


# ---- cuts -------------------------------------------------------------------------------------

shares = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any)


@steady
@given(st.integers(0, 60), shares)
def test_cuts_cover_in_order_and_follow_the_shares(extent: int, parts: list[int]) -> None:
    found = cut(extent, parts)
    assert [i for span in found for i in range(*span)] == list(range(extent))
    assert all(low <= high for low, high in found)
    exact, total = Fraction(0), sum(parts)
    for (_, high), part in zip(found, parts, strict=True):
        exact += Fraction(part * extent, total)
        assert abs(high - exact) <= Fraction(1, 2)


@steady
@given(st.integers(0, 30), shares)
def test_cuts_of_maps_of_other_sizes_correspond(extent: int, parts: list[int]) -> None:
    """The borders of a map twice as high are twice as far, up to rounding."""
    for one, other in zip(cut(extent, parts), cut(2 * extent, parts), strict=True):
        assert all(abs(2 * a - b) <= 1 for a, b in zip(one, other, strict=True))


@steady
@given(st.tuples(*[st.integers(0, 6)] * 3), shares, shares)
def test_grid_is_a_disjoint_cover(shape: tuple[int, ...], rows: list[int], cols: list[int]) -> None:
    cells = grid(shape, [(1, rows), (2, cols)])
    assert len(cells) == len(rows) * len(cols)
    found = sorted(point for cell in cells for point in points(cell))
    assert found == sorted(points(Box.whole(shape)))


# ---- windows ----------------------------------------------------------------------------------

sizes = st.integers(1, 6)
starts = st.integers(-3, 12)


@steady
@given(sizes, sizes, st.integers(0, 5), sizes, starts, sizes)
def test_sliding(
    kernel: int, stride: int, padding: int, dilation: int, low: int, count: int
) -> None:
    window = Sliding(kernel, stride, padding, dilation)
    read = {
        o * stride - padding + k * dilation for o in range(low, low + count) for k in range(kernel)
    }
    assert window.reads(low, low + count) == (min(read), max(read) + 1)


@steady
@given(sizes, sizes, st.integers(0, 5), sizes, st.integers(0, 12), sizes)
def test_transposed(
    kernel: int, stride: int, padding: int, dilation: int, low: int, count: int
) -> None:
    """All inputs that touch are read, and the result of what is read covers what was asked."""
    window = Transposed(kernel, stride, padding, dilation)
    first, last = window.reads(low, low + count)
    wanted = range(low, low + count)
    touching = {
        i
        for i in range(-60, 60)
        for k in range(kernel)
        if i * stride - padding + k * dilation in wanted
    }
    assert touching <= set(range(first, last))
    begin = window.starts(first)
    length = (last - first - 1) * stride + dilation * (kernel - 1) + 1
    assert begin <= low and low + count <= begin + length
    reach = dilation * (kernel - 1)
    assert last - first <= (count + reach) // stride + 3, "reads much more than needed"


def nearest_tables(extent: int, result: int, scale: float | None, dtype: torch.dtype) -> list:
    """What torch really reads: small and large maps take different ways inside it."""
    found = []
    for width, format_ in product((1, 40), (torch.contiguous_format, torch.channels_last)):
        x = torch.arange(extent, dtype=dtype).view(1, 1, -1, 1).expand(1, 2, extent, width)
        x = x.contiguous(memory_format=format_)
        size = [result, 3 * width] if scale is None else None
        y = torch.ops.aten.upsample_nearest2d.vec(x, size, None if scale is None else [scale, 3.0])
        found.append(y[0, 0, :, 0].long().tolist())
    return found


SCALES = (0.3, 0.45, 0.5, 0.7, 1.01, 1.3, 1.5, 1.7, 2.0, 2.02, 2.25, 2.5, 3.0, 3.1, 4.0, 4.3, 6.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_reads_what_torch_reads(dtype: torch.dtype) -> None:
    """For hundreds of sizes and scales, except where torch disagrees with itself."""
    resizes: list[tuple[int, int, float | None]] = [
        (a, b, None) for a in range(1, 70, 3) for b in range(1, 140, 7)
    ]
    resizes += [(a, int(a * s), s) for a in range(1, 70, 2) for s in SCALES if int(a * s)]
    ambiguous = 0
    for extent, result, scale in resizes:
        window = Nearest(extent, result, scale)
        if window.is_ambiguous(double=dtype == torch.float64):
            ambiguous += 1
            continue
        ours = [window.index(output) for output in range(result)]
        for theirs in nearest_tables(extent, result, scale, dtype):
            assert ours == theirs, (extent, result, scale)
        for low in range(0, result, 5):
            high = min(low + 4, result)
            assert window.reads(low, high) == (min(ours[low:high]), max(ours[low:high]) + 1)
    assert 0 < ambiguous < len(resizes) / 8


@pytest.mark.parametrize("scale", [None, *SCALES])
def test_nearest_gradient_flows_back_the_same_way(scale: float | None) -> None:
    for extent in (2, 5, 9, 31, 45):
        result = 3 * extent + 2 if scale is None else int(extent * scale)
        if not result:
            continue
        window = Nearest(extent, result, scale)
        x = torch.zeros(1, 1, extent, 1, dtype=torch.float64, requires_grad=True)
        size = [result, 1] if scale is None else None
        y = torch.ops.aten.upsample_nearest2d.vec(x, size, None if scale is None else [scale, 1.0])
        y.backward(torch.arange(1.0, result + 1, dtype=torch.float64).view(1, 1, -1, 1))
        expected = torch.zeros(extent, dtype=torch.float64)
        for output in range(result):
            expected[window.index(output)] += output + 1
        assert x.grad is not None and torch.equal(x.grad.flatten(), expected)


def linear_reads(extent: int, result: int, corners: bool, scale: float | None) -> torch.Tensor:
    """Which inputs torch gives any weight, as a matrix of outputs by inputs."""
    x = torch.eye(extent, dtype=torch.float64).view(1, extent, extent, 1)
    size = [result, 1] if scale is None else None
    scales = None if scale is None else [scale, 1.0]
    return torch.ops.aten.upsample_bilinear2d.vec(x, size, corners, scales)[0, :, :, 0].T != 0


@steady
@given(st.integers(1, 24), st.integers(1, 40), st.booleans())
def test_bilinear_reads_all_that_torch_reads(extent: int, result: int, corners: bool) -> None:
    _check_linear(Bilinear(extent, result, corners), linear_reads(extent, result, corners, None))


@steady
@given(st.integers(2, 24), st.floats(0.2, 4.0), st.booleans())
def test_bilinear_by_scale(extent: int, scale: float, corners: bool) -> None:
    result = int(extent * scale)
    if result:
        window = Bilinear(extent, result, corners, scale)
        _check_linear(window, linear_reads(extent, result, corners, scale))


def _check_linear(window: Bilinear, reads: torch.Tensor) -> None:
    for low in range(window.result):
        for high in {low + 1, min(low + 5, window.result), window.result}:
            first, last = window.reads(low, high)
            assert 0 <= first < last <= window.extent
            seen = reads[low:high].any(0).nonzero().flatten().tolist()
            assert first <= min(seen) and max(seen) < last
            assert last - first <= max(seen) - min(seen) + 3, "reads much more than needed"


@steady
@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_adaptive_reads_what_torch_averages(extent: int, result: int, data: st.DataObject) -> None:
    x = torch.eye(extent, dtype=torch.float64).view(1, extent, extent, 1)
    weights = F.adaptive_avg_pool2d(x, (result, 1))[0, :, :, 0].T
    low = data.draw(st.integers(0, result - 1))
    high = data.draw(st.integers(low + 1, result))
    seen = (weights[low:high] != 0).any(0).nonzero().flatten().tolist()
    assert Adaptive(extent, result).reads(low, high) == (min(seen), max(seen) + 1)


# ---- transfers --------------------------------------------------------------------------------


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """A disjoint cover by a grid, and what as many devices need of it."""
    shape = draw(st.tuples(*[st.integers(1, 6)] * draw(st.integers(2, 4))))
    rows, cols = draw(shares), draw(shares)
    owned = grid(shape, [(0, rows), (len(shape) - 1, cols)])
    needed = draw(st.lists(boxes(len(shape)), min_size=len(owned), max_size=len(owned)))
    return owned, tuple(box.clip(shape) for box in needed)


@steady
@given(exchanges())
def test_every_needed_element_arrives_once_from_its_owner(
    exchange: tuple[tuple[Box, ...], tuple[Box, ...]],
) -> None:
    owned, needed = exchange
    moved = transfers(owned, needed)
    for device, need in enumerate(needed):
        arrived = [p for t in moved if t.destination == device for p in points(t.box)]
        assert sorted(arrived) == sorted(points(need))
    for transfer in moved:
        assert not transfer.box.is_empty
        assert points(transfer.box) <= points(owned[transfer.source])


@steady
@given(exchanges())
def test_adjoint_sends_back_and_adds(
    exchange: tuple[tuple[Box, ...], tuple[Box, ...]],
) -> None:
    """<Fx, y> = <x, F'y> in integers, x over owned elements and y over needed copies."""
    owned, needed = exchange
    draw = random.Random(str(exchange))
    x = [{p: draw.randint(-9, 9) for p in points(box)} for box in owned]
    y = [{p: draw.randint(-9, 9) for p in points(box)} for box in needed]
    forward = sum(
        x[t.source][p] * y[t.destination][p]
        for t in transfers(owned, needed)
        for p in points(t.box)
    )
    back = [dict.fromkeys(points(box), 0) for box in owned]
    for transfer in adjoint(transfers(owned, needed)):
        for point in points(transfer.box):
            back[transfer.destination][point] += y[transfer.source][point]
    assert forward == sum(x[d][p] * back[d][p] for d in range(len(owned)) for p in x[d])

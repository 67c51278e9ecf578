"""Operators that move elements without computing: reshape, permute, slice, cat."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.geometry import Box, Span
from terrazzo.graph.rules.rule import (
    LOCAL,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Rule,
    is_cut,
    whole,
)
from terrazzo.records import Graph, Node


def dim_of(argument: object, rank: int) -> int:
    assert isinstance(argument, int)
    return argument % rank


def factors(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Matches runs of dimensions of equal product, as short as they come.

    (2, 6, 5, 5) to (2, 2, 3, 5, 5) gives [0]-[0], [1]-[1, 2], [2]-[3], [3]-[4]. Dimensions of one
    element join whatever run is open, or stand alone.
    """
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            runs.append(([i], []))
            i += 1
            continue
        if j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            runs.append(([], [j]))
            j += 1
            continue
        left, right = [i], [j]
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= before[i]
                left.append(i)
                i += 1
            else:
                b *= after[j]
                right.append(j)
                j += 1
        runs.append((left, right))
    return runs


def _reshape_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    before, after = graph.shape(node.refs[0]), graph.shape(node.output)
    letters = axes[node.refs[0]]
    if 0 in before:
        return whole(node, graph)
    result = ["."] * len(after)
    for left, right in factors(before, after):
        if len(left) == 1 and len(right) == 1:
            result[right[0]] = letters[left[0]]
        elif any(letters[dim] != "." for dim in left):
            return whole(node, graph)
    return Placement(LOCAL, "".join(result)) if is_cut("".join(result)) else whole(node, graph)


def _reshape(node: Node, graph: Graph, box: Box) -> Local:
    before, after = graph.shape(node.refs[0]), graph.shape(node.output)
    spans: list[Span] = [(0, extent) for extent in before]
    size, crop = list(after), [(low, high) for low, high in box.spans]
    for left, right in factors(before, after):
        if len(left) == 1 and len(right) == 1:
            low, high = box.spans[right[0]]
            spans[left[0]] = (low, high)
            size[right[0]] = high - low
            crop[right[0]] = (0, high - low)
    read = Read(Box(tuple(spans)))
    return Local((read,), node.op, (node.args[0], tuple(size)), crop=tuple(crop))


def _permute_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    order = _order(node, graph)
    return Placement(LOCAL, "".join(axes[node.refs[0]][dim] for dim in order))


def _permute(node: Node, graph: Graph, box: Box) -> Local:
    spans = [(0, 0)] * box.rank
    for position, dim in enumerate(_order(node, graph)):
        spans[dim] = box.spans[position]
    return Local((Read(Box(tuple(spans))),), node.op, node.args)


def _order(node: Node, graph: Graph) -> list[int]:
    rank = len(graph.shape(node.refs[0]))
    if node.op == "aten.permute.default":
        assert isinstance(node.args[1], tuple)
        return [dim_of(dim, rank) for dim in node.args[1]]
    order = list(range(rank))
    first, second = dim_of(node.args[1], rank), dim_of(node.args[2], rank)
    order[first], order[second] = second, first
    return order


def _slice_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    return Placement(LOCAL, axes[node.refs[0]])


def _slice(node: Node, graph: Graph, box: Box) -> Local:
    x, dim_arg, start_arg, _, step_arg = node.args
    shape = graph.shape(node.refs[0])
    dim = dim_of(dim_arg, len(shape))
    start, step = start_arg or 0, step_arg or 1
    assert isinstance(start, int) and isinstance(step, int)
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    low, high = box.spans[dim]
    read = Read(box.replace(dim, (start + low * step, start + (high - 1) * step + 1)))
    return Local((read,), node.op, (x, dim, 0, None, step))


def _select_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    dim = dim_of(node.args[1], len(letters))
    if letters[dim] != ".":
        return whole(node, graph)
    return Placement(LOCAL, letters[:dim] + letters[dim + 1 :])


def _select(node: Node, graph: Graph, box: Box) -> Local:
    shape = graph.shape(node.refs[0])
    dim = dim_of(node.args[1], len(shape))
    spans = list(box.spans)
    spans.insert(dim, (0, shape[dim]))
    return Local((Read(Box(tuple(spans))),), node.op, node.args)


def _repeat_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    times = node.args[1]
    assert isinstance(times, tuple)
    letters = "." * (len(times) - len(axes[node.refs[0]])) + axes[node.refs[0]]
    if any(letter != "." and count != 1 for letter, count in zip(letters, times, strict=True)):
        return whole(node, graph)
    return Placement(LOCAL, letters)


def _repeat(node: Node, graph: Graph, box: Box) -> Local:
    shape, times = graph.shape(node.refs[0]), node.args[1]
    assert isinstance(times, tuple)
    extra = len(times) - len(shape)
    spans = [
        span if count == 1 else (0, extent)
        for span, count, extent in zip(box.spans[extra:], times[extra:], shape, strict=True)
    ]
    return Local((Read(Box(tuple(spans))),), node.op, node.args)


def _cat_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    rank = len(graph.shape(node.output))
    names = [name for name in node.refs if len(graph.shape(name)) == rank]
    if len(names) != len(node.refs):
        return whole(node, graph)  # torch skips old-style empty tensors here
    dim = dim_of(node.args[1], rank)
    letters = next(axes[name] for name in names if is_cut(axes[name]))
    if any(is_cut(axes[name]) and axes[name] != letters for name in names) or letters[dim] != ".":
        return whole(node, graph)
    return Placement(LOCAL, letters)


def _cat(node: Node, graph: Graph, box: Box) -> Local:
    dim = dim_of(node.args[1], box.rank)
    reads = tuple(Read(box.replace(dim, (0, graph.shape(name)[dim]))) for name in node.refs)
    return Local(reads, node.op, node.args)


def _stack_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = next(axes[name] for name in node.refs if is_cut(axes[name]))
    if any(is_cut(axes[name]) and axes[name] != letters for name in node.refs):
        return whole(node, graph)
    dim = dim_of(node.args[1], len(letters) + 1)
    return Placement(LOCAL, letters[:dim] + "." + letters[dim:])


def _stack(node: Node, graph: Graph, box: Box) -> Local:
    dim = dim_of(node.args[1], box.rank)
    read = Read(Box(box.spans[:dim] + box.spans[dim + 1 :]))
    return Local((read,) * len(node.refs), node.op, node.args)


def _scatter_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """Writing into a slice of a tensor: local when the slice is taken where no letter stands."""
    letters, source = axes[node.refs[0]], axes[node.refs[1]]
    dim = dim_of(node.args[2], len(letters))
    if node.op == "aten.select_scatter.default":
        source = source[:dim] + "." + source[dim:]
    if not is_cut(letters):
        letters = source  # a map written into fresh zeros
    if letters[dim] != "." or (is_cut(source) and source != letters):
        return whole(node, graph)
    return Placement(LOCAL, letters)


def _scatter(node: Node, graph: Graph, box: Box) -> Local:
    dim = dim_of(node.args[2], box.rank)
    if node.op == "aten.select_scatter.default":
        source = Box(box.spans[:dim] + box.spans[dim + 1 :])
    else:
        source = box.replace(dim, (0, graph.shape(node.refs[1])[dim]))
    target = box.replace(dim, (0, graph.shape(node.refs[0])[dim]))
    return Local((Read(target), Read(source)), node.op, node.args)


TABLE.add(Rule(place=_reshape_place, local=_reshape), "aten.reshape.default")
TABLE.add(Rule(place=_permute_place, local=_permute), "aten.permute.default", "aten.transpose.int")
TABLE.add(Rule(place=_slice_place, local=_slice), "aten.slice.Tensor")
TABLE.add(Rule(place=_select_place, local=_select), "aten.select.int")
TABLE.add(Rule(place=_repeat_place, local=_repeat), "aten.repeat.default")
TABLE.add(Rule(place=_cat_place, local=_cat), "aten.cat.default")
TABLE.add(Rule(place=_stack_place, local=_stack), "aten.stack.default")
TABLE.add(
    Rule(place=_scatter_place, local=_scatter),
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
)

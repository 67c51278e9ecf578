"""Operators that fold dimensions: means, sums, extremes and norms.

Folding only dimensions without a letter is local. Folding positions is a reduction: one part per
device over what it owns, combined into a result that all devices hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod

from terrazzo.geometry import Box
from terrazzo.graph.rules.rule import (
    LOCAL,
    REDUCE,
    TABLE,
    AxesOf,
    Local,
    Placement,
    Read,
    Reduction,
    Rule,
    blank,
    whole,
)
from terrazzo.records import Argument, Dtype, Graph, Node


def folded(argument: Argument, rank: int) -> tuple[int, ...]:
    """The dimensions an argument names, all of them when it names none."""
    if argument is None or argument == ():
        return tuple(range(rank))
    dims = argument if isinstance(argument, tuple) else (argument,)
    return tuple(sorted(dim % rank for dim in dims if isinstance(dim, int)))


def kept_box(box: Box, dims: Sequence[int], keepdim: bool) -> Box:
    """Where the result of folding a box lies in the result of folding everything."""
    spans = [
        (0, 1) if dim in dims else span
        for dim, span in enumerate(box.spans)
        if keepdim or dim not in dims
    ]
    return Box(tuple(spans))


class Fold:
    """One reduction operator: where its arguments stand and how parts combine."""

    def __init__(
        self,
        *,
        dims: int | None,
        keepdim: int | None,
        partial: str,
        combine: str = "sum",
        finish: str = "",
        rows: int = 0,
        divides: Callable[[Node], bool] = lambda node: True,
    ) -> None:
        self.dims, self.keepdim = dims, keepdim
        self.partial, self.combine, self.finish, self.rows = partial, combine, finish, rows
        self.divides = divides

    def _folded(self, node: Node, graph: Graph) -> tuple[tuple[int, ...], bool]:
        rank = len(graph.shape(node.refs[0]))
        dims = folded(None if self.dims is None else node.args[self.dims], rank)
        return dims, self.keepdim is not None and bool(node.args[self.keepdim])

    def place(self, node: Node, graph: Graph, axes: AxesOf) -> Placement:
        letters = axes[node.refs[0]]
        dims, keepdim = self._folded(node, graph)
        if any(letters[dim] != "." for dim in dims):
            if not self.partial or not self.divides(node):
                return whole(node, graph)
            return Placement(REDUCE, blank(node, graph))
        kept = [
            "." if dim in dims else letter
            for dim, letter in enumerate(letters)
            if keepdim or dim not in dims
        ]
        return Placement(LOCAL, "".join(kept))

    def local(self, node: Node, graph: Graph, box: Box) -> Local:
        shape = graph.shape(node.refs[0])
        dims, keepdim = self._folded(node, graph)
        spans, position = [], 0
        for dim, extent in enumerate(shape):
            if dim in dims:
                spans.append((0, extent))
                position += keepdim
            else:
                spans.append(box.spans[position])
                position += 1
        return Local((Read(Box(tuple(spans))),), node.op, node.args)

    def reduce(self, node: Node, graph: Graph) -> Reduction:
        shape = graph.shape(node.refs[0])
        dims, keepdim = self._folded(node, graph)
        power = node.args[1] if self.finish == "terrazzo.root" else None
        count = prod(shape[dim] for dim in dims)

        def partial(box: Box) -> Local:
            return Local((Read(box),), self.partial, (node.args[0], dims, keepdim, count, power))

        return Reduction(
            main=0,
            partial=partial,
            combine=self.combine,
            shape=kept_box(Box.whole(shape), dims, keepdim).shape,
            keeps=lambda box: kept_box(box, dims, keepdim),
            finish=self.finish,
            finish_args=() if power is None else (power,),
            rows=self.rows,
        )

    def rule(self) -> Rule:
        return Rule(place=self.place, local=self.local, reduce=self.reduce)


def accepts_dtype(node: Node) -> bool:
    """A reduction that also converts keeps to plain torch: its parts would round differently."""
    return not any(isinstance(argument, Dtype) for argument in node.args)


def _guarded(rule: Rule) -> Rule:
    def place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
        return rule.place(node, graph, axes) if accepts_dtype(node) else whole(node, graph)

    return Rule(place=place, local=rule.local, reduce=rule.reduce)


def _add(op: str, fold: Fold) -> None:
    TABLE.add(_guarded(fold.rule()), op)


_add("aten.mean.dim", Fold(dims=1, keepdim=2, partial="terrazzo.part_mean"))
_add("aten.mean.default", Fold(dims=None, keepdim=None, partial="terrazzo.part_mean"))
_add("aten.sum.dim_IntList", Fold(dims=1, keepdim=2, partial="terrazzo.part_sum"))
_add("aten.sum.default", Fold(dims=None, keepdim=None, partial="terrazzo.part_sum"))
_add(
    "aten.amax.default",
    Fold(dims=1, keepdim=2, partial="terrazzo.part_amax", combine="max", rows=2),
)
_add(
    "aten.amin.default",
    Fold(
        dims=1,
        keepdim=2,
        partial="terrazzo.part_amin",
        combine="max",
        finish="terrazzo.negate",
        rows=2,
    ),
)


def _plain_order(node: Node) -> bool:
    """Norms that are a root of a sum; below order 1 the gradient at zero is torch's secret."""
    order = node.args[1]
    return isinstance(order, (int, float)) and 1 <= order < inf


_add(
    "aten.linalg_vector_norm.default",
    Fold(
        dims=2,
        keepdim=3,
        partial="terrazzo.part_power",
        finish="terrazzo.root",
        divides=_plain_order,
    ),
)
for _op in ("prod.dim_int", "logsumexp.default", "argmax.default", "argmin.default"):
    _add(f"aten.{_op}", Fold(dims=1, keepdim=2, partial=""))
for _op in ("any.dim", "all.dim", "any.dims", "all.dims"):
    _add(f"aten.{_op}", Fold(dims=1, keepdim=2, partial=""))
for _op in ("var.correction", "var.dim", "std.correction", "std.dim"):
    _add(f"aten.{_op}", Fold(dims=1, keepdim=3, partial=""))


def _values_only(kernel: str) -> Rule:
    """max and min along a dimension: local while nobody asks where the extreme was."""
    fold = Fold(dims=1, keepdim=2, partial="")

    def place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
        alone = len(node.outputs) == 1
        return fold.place(node, graph, axes) if alone else whole(node, graph)

    def local(node: Node, graph: Graph, box: Box) -> Local:
        return replace(fold.local(node, graph, box), op=kernel)

    return Rule(place=place, local=local)


TABLE.add(_values_only("terrazzo.max_values"), "aten.max.dim")
TABLE.add(_values_only("terrazzo.min_values"), "aten.min.dim")


def global_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """A pool to 1x1 over an image that is cut."""
    letters = axes[node.refs[0]]
    if letters[:-2].strip(".nc") or letters[-2:].strip(".hw"):
        return whole(node, graph)
    if letters[-2:] == "..":
        return Placement(LOCAL, letters)  # every device has all positions of what it has
    return Placement(REDUCE, blank(node, graph))


def _global(partial: str, combine: str, rows: int) -> Callable[[Node, Graph], Reduction]:
    def reduce(node: Node, graph: Graph) -> Reduction:
        shape = graph.shape(node.refs[0])
        dims = (len(shape) - 2, len(shape) - 1)
        count = shape[-1] * shape[-2]

        def part(box: Box) -> Local:
            (top, _), (left, _) = box.spans[-2:]
            where = (top, left, shape[-1]) if combine == "first" else None
            return Local((Read(box),), partial, (node.args[0], dims, True, count, where))

        return Reduction(
            main=0,
            partial=part,
            combine=combine,
            shape=(*shape[:-2], 1, 1),
            keeps=lambda box: kept_box(box, dims, True),
            rows=rows,
        )

    return reduce


global_avg = _global("terrazzo.part_mean", "sum", 0)
global_max = _global("terrazzo.part_first_max", "first", 2)

"""Losses written inside the model: they stay spread until the scalar."""

from __future__ import annotations

from math import prod

from terrazzo.geometry import Box
from terrazzo.graph.rules.pointwise import broadcast_axes, broadcast_read
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
    full,
    is_cut,
    whole,
)
from terrazzo.records import Graph, Node

NONE, MEAN = 0, 1
SCALAR = Box(())


def _reduction(node: Node, position: int) -> int:
    value = node.args[position]
    assert isinstance(value, int)
    return value


def elementwise(position: int) -> Rule:
    """A loss of matching elements; its reduction is the argument at ``position``."""

    def shape_of(node: Node, graph: Graph) -> tuple[int, ...]:
        return graph.shape(node.refs[0])

    def place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
        shape = shape_of(node, graph)
        names = [name for name in node.refs if _fits(graph.shape(name), shape)]
        letters = broadcast_axes(shape, graph, names, axes)
        if not is_cut(letters) or letters != axes[node.refs[0]] or len(names) != len(node.refs):
            return whole(node, graph)
        if _reduction(node, position) == NONE:
            return Placement(LOCAL, letters)
        return Placement(REDUCE, "")

    def local(node: Node, graph: Graph, box: Box) -> Local:
        shape = shape_of(node, graph)
        reads = tuple(broadcast_read(box, shape, graph.shape(name)) for name in node.refs)
        return Local(reads, node.op, node.args)

    def reduce(node: Node, graph: Graph) -> Reduction:
        shape = shape_of(node, graph)
        scale = prod(shape) if _reduction(node, position) == MEAN else 1
        bare = (*node.args[:position], NONE, *node.args[position + 1 :])

        def partial(box: Box) -> Local:
            reads = tuple(broadcast_read(box, shape, graph.shape(name)) for name in node.refs)
            return Local(reads, "terrazzo.part_loss", (node.op, scale, *bare))

        return Reduction(main=0, partial=partial, combine="sum", shape=(), keeps=lambda box: SCALAR)

    return Rule(place=place, local=local, reduce=reduce)


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether a tensor is broadcast to the other's shape, and not both to a third one."""
    aligned = into[len(into) - len(shape) :]
    return len(shape) <= len(into) and all(
        extent in (1, other) for extent, other in zip(shape, aligned, strict=True)
    )


def _cross_entropy_place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = axes[node.refs[0]]
    if len(letters) < 2 or letters[1] != ".":
        return whole(node, graph)
    if _reduction(node, 3) == NONE:
        return Placement(LOCAL, letters[0] + letters[2:])
    return Placement(REDUCE, "")


def _cross_entropy_reads(node: Node, graph: Graph, box: Box) -> tuple[Read, ...]:
    """``box`` is of the scores (N, C, positions); targets are class numbers or probabilities."""
    scores, target = graph.shape(node.refs[0]), graph.shape(node.refs[1])
    target_box = box if len(target) == len(scores) else Box((box.spans[0], *box.spans[2:]))
    return (Read(box), Read(target_box), *(full(graph, name) for name in node.refs[2:]))


def _cross_entropy_local(node: Node, graph: Graph, box: Box) -> Local:
    classes = graph.shape(node.refs[0])[1]
    scores = Box((box.spans[0], (0, classes), *box.spans[1:]))
    return Local(_cross_entropy_reads(node, graph, scores), node.op, node.args)


def _cross_entropy_reduce(node: Node, graph: Graph) -> Reduction:
    """Two sums, the losses and their weights; the mean is their quotient."""
    mean = _reduction(node, 3) == MEAN
    kernel = "part_nll" if node.op == "aten.nll_loss_nd.default" else "part_cross_entropy"

    def partial(box: Box) -> Local:
        reads = _cross_entropy_reads(node, graph, box)
        return Local(reads, f"terrazzo.{kernel}", node.args)

    return Reduction(
        main=0,
        partial=partial,
        combine="sum",
        shape=(2,),
        keeps=lambda box: Box(((0, 2),)),
        finish="terrazzo.quotient" if mean else "terrazzo.numerator",
    )


TABLE.add(
    Rule(place=_cross_entropy_place, local=_cross_entropy_local, reduce=_cross_entropy_reduce),
    "aten.cross_entropy_loss.default",
    "aten.nll_loss_nd.default",
)
for _op, _position in {
    "mse_loss.default": 2,
    "l1_loss.default": 2,
    "smooth_l1_loss.default": 2,
    "huber_loss.default": 2,
    "soft_margin_loss.default": 2,
    "kl_div.default": 2,
    "binary_cross_entropy.default": 3,
    "binary_cross_entropy_with_logits.default": 4,
}.items():
    TABLE.add(elementwise(_position), f"aten.{_op}")

"""What a rule is, and the table that holds them.

Every dimension of every value carries a letter: ``n`` for samples, ``c`` for channels, ``h`` or
``w`` for positions of the image, ``.`` where it can't be cut. Rules carry the letters forward; a
value without letters is whole. Only letters that a layout cuts are written, so under tiles a map
is ``..hw`` and under channels ``.c..``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from terrazzo.geometry import Box, Span
from terrazzo.records import Argument, Graph, Node

Axes = str
"""One letter per dimension, for instance ``..hw``."""

LOCAL, NORM, REDUCE, SUM, WHOLE = "local", "norm", "reduce", "sum", "whole"


@dataclass(frozen=True, slots=True)
class Placement:
    """How a node runs, and the letters of its main output."""

    role: str
    axes: Axes


@dataclass(frozen=True, slots=True)
class Read:
    """What one tensor argument contributes: a box of it, then padding around that box."""

    box: Box
    pad: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Local:
    """How one device computes a box of a result: what to read, what to call, what to keep.

    ``args`` hold the references of the node in their places; the reads answer them in order.
    ``crop`` is the part of the call's result that is the box asked for (all of it when None).
    """

    reads: tuple[Read, ...]
    op: str
    args: tuple[Argument, ...]
    crop: tuple[Span, ...] | None = None
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a result over all positions is made from one part per device.

    Each device computes ``partial`` of the box it owns of the value that ``main`` refers to; the
    parts are combined ("sum", "max" or "first") and ``finish`` turns that into the result.
    ``keeps`` says where the partial of a box lies in the partial of everything, whose shape is
    ``shape``; ``rows`` is the number of numbers kept per element (a maximum keeps its ties too).
    """

    main: int
    partial: Callable[[Box], Local]
    combine: str
    shape: tuple[int, ...]
    keeps: Callable[[Box], Box]
    finish: str = ""
    finish_args: tuple[Argument, ...] = ()
    rows: int = 0


class Letters(dict[str, Axes]):
    """The letters of every value known so far, under a layout that cuts the axes of ``mask``."""

    def __init__(self, mask: str, letters: Mapping[str, Axes]) -> None:
        super().__init__(letters)
        self.mask = mask


AxesOf = Letters


def addend(local: Local, channels: Span, *, dim: int, weight_dim: int) -> Local:
    """A product over some of the channels it reads, from its form over all of them.

    ``dim`` is where channels stand in what it reads, ``weight_dim`` where they stand in the
    weights. The bias, its third argument, is added where the first channels are.
    """
    x, weight, *rest = local.reads
    reads = (
        Read(x.box.replace(dim, channels), x.pad),
        Read(weight.box.replace(weight_dim, channels)),
        *rest,
    )
    args = local.args if channels[0] == 0 else (*local.args[:2], None, *local.args[3:])
    return replace(local, reads=reads, args=args)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one operator; parts it does not need stay unset."""

    place: Callable[[Node, Graph, AxesOf], Placement]
    local: Callable[[Node, Graph, Box], Local] | None = None
    reduce: Callable[[Node, Graph], Reduction] | None = None
    sums: Callable[[Node, Graph, Box, Span], Local] | None = None
    """How a device computes an addend of a box from some of the channels it reads."""
    makes: str = ""
    """Letters that its result has whatever it reads: a product makes new channels."""


@dataclass
class Table:
    """Operator name to rule."""

    rules: dict[str, Rule] = field(default_factory=dict)

    def add(self, rule: Rule, *ops: str) -> None:
        for op in ops:
            if op in self.rules:
                raise ValueError(f"two rules for {op}")
            self.rules[op] = rule


TABLE = Table()


def rule_for(op: str) -> Rule | None:
    return TABLE.rules.get(op)


def blank(node: Node, graph: Graph) -> Axes:
    return "." * len(graph.shape(node.output))


def whole(node: Node, graph: Graph) -> Placement:
    return Placement(WHOLE, blank(node, graph))


def is_cut(axes: Axes) -> bool:
    return axes.strip(".") != ""


def place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    """How a node runs, given the letters of what it reads."""
    rule = rule_for(node.op)
    if rule is None:
        return whole(node, graph)
    if not any(is_cut(axes[name]) for name in node.refs) and not set(rule.makes) & set(axes.mask):
        return whole(node, graph)
    if any(0 in graph.shape(name) for name in (node.output, *node.refs) if name):
        return whole(node, graph)  # a tensor without elements has no boxes to speak of
    return rule.place(node, graph, axes)


def full(graph: Graph, name: str) -> Read:
    """A read of all of a value."""
    return Read(Box.whole(graph.shape(name)))

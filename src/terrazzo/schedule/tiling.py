"""The backward walk: which box of every value each device computes, and needs from outside.

A group's outputs are owned by tiles; each operator's rule says what its inputs need, and the hull
of all that is what a device computes. Where statistics, reductions or a gather read a value, the
tile a device owns is added to what it needs: a row that no window reads still counts in a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.errors import PlanError
from terrazzo.geometry import Box, cut
from terrazzo.graph.rules import LOCAL, REDUCE, WHOLE, Axes, Local, Placement, place, rule_for
from terrazzo.graph.rules.rule import is_cut
from terrazzo.records import Graph, Layout, Plan, Ref

Boxes = tuple[Box, ...]


def owned(shape: Sequence[int], axes: Axes, layout: Layout) -> Boxes:
    """Who owns which element: a disjoint cover by tiles.

    Along an axis that the value does not have, only the first device of a row of the grid owns.
    """
    boxes = [Box.whole(shape)]
    for axis, shares in layout.cuts:
        dim = axes.find(axis)
        if dim >= 0:
            spans = cut(shape[dim], shares)
            boxes = [box if box.is_empty else box.replace(dim, s) for box in boxes for s in spans]
        else:
            nothing = [Box.empty(len(shape))] * (len(shares) - 1)
            boxes = [piece for box in boxes for piece in (box, *nothing)]
    return tuple(boxes)


def group_of_nodes(graph: Graph, plan: Plan) -> list[int]:
    """The group of every node; checks that the plan is for this graph."""
    lasts = {group.last: index for index, group in enumerate(plan.groups)}
    found, current = [], 0
    for node in graph.nodes:
        found.append(min(current, len(plan.groups) - 1))
        ended = [lasts[name] for name in node.outputs if name in lasts]
        if ended:
            if ended[0] != current:
                raise PlanError(
                    f"the plan's group {current} should end at {plan.groups[current].last!r}, but "
                    f"{plan.groups[ended[0]].last!r} comes first: it was made for another model"
                )
            current += 1
    if current < len(plan.groups):
        raise PlanError(
            f"the plan ends group {current} at {plan.groups[current].last!r}, which this model "
            "does not have: it was made for another model or input"
        )
    return found


def placements(graph: Graph, plan: Plan) -> tuple[list[Placement], dict[str, Axes]]:
    """How each node runs under its group's layout, and the letters of every value."""
    axes = {name: "." * len(value.shape) for name, value in graph.values.items()}
    for name in graph.inputs:
        if name and len(graph.shape(name)) == 4:
            axes[name] = "..hw"
    placed = []
    for node, group in zip(graph.nodes, group_of_nodes(graph, plan), strict=True):
        placement = place(node, graph, axes)
        axes[node.output] = placement.axes
        alone = plan.devices == 1 and not plan.groups[group].passes
        if plan.groups[group].layout.is_whole or alone:
            placement = Placement(WHOLE, placement.axes)
        placed.append(placement)
    return placed, axes


class Tiling:
    """Boxes of every value under one plan."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.groups = group_of_nodes(graph, plan)
        self.placed, self.axes = placements(graph, plan)
        self.spread = {
            node.output
            for node, placement in zip(graph.nodes, self.placed, strict=True)
            if placement.role == LOCAL
        } | {name for name in graph.inputs if name and is_cut(self.axes[name])}
        self.computed: dict[str, Boxes] = {}
        self.needed: dict[tuple[int, str], Boxes] = {}
        self.locals: dict[int, tuple[Local | None, ...]] = {}
        self._walk()

    def tiles(self, name: str, group: int) -> Boxes:
        """Who owns which element of a value in the layout of a group."""
        return owned(self.graph.shape(name), self.axes[name], self.plan.groups[group].layout)

    def made_tiles(self, name: str) -> Boxes:
        """The tiles of a value in the group that makes it."""
        return self.tiles(name, self.groups[self.graph.producer[name]])

    def nothing(self, name: str) -> Boxes:
        return (Box.empty(len(self.graph.shape(name))),) * self.plan.devices

    def widened(self, name: str, box: Box) -> Box:
        """A box that is whole along every dimension that is not cut, as operators expect."""
        for dim, letter in enumerate(self.axes[name]):
            if letter == "." and not box.is_empty:
                box = box.replace(dim, (0, self.graph.shape(name)[dim]))
        return box

    def _walk(self) -> None:
        for index in reversed(range(len(self.graph.nodes))):
            role, node = self.placed[index].role, self.graph.nodes[index]
            if role == WHOLE:
                continue
            if role != REDUCE:
                self._find_computed(node.output, self.groups[index])
            self.locals[index] = self._locals(index)
            self._find_needed(index)

    def _find_computed(self, name: str, group: int) -> None:
        inside = self.needed.get((group, name), self.nothing(name))
        if self._leaves(name, group):
            inside = _hulls(inside, self.tiles(name, group))
        self.computed[name] = inside

    def _leaves(self, name: str, group: int) -> bool:
        """Whether somebody reads what devices own of a value: outside, or whole, or counting."""
        if Ref(name) in self.graph.outputs or name in self.graph.mutations.values():
            return True
        return any(
            self.groups[reader] != group or self.placed[reader].role != LOCAL
            for reader in self.graph.consumers.get(name, ())
        )

    def _locals(self, index: int) -> tuple[Local | None, ...]:
        """How each device computes its part of one split node."""
        node, graph = self.graph.nodes[index], self.graph
        rule = rule_for(node.op)
        assert rule is not None
        if self.placed[index].role == REDUCE:
            assert rule.reduce is not None
            reduction = rule.reduce(node, graph)
            boxes = self.tiles(node.refs[reduction.main], self.groups[index])
            return tuple(None if box.is_empty else reduction.partial(box) for box in boxes)
        assert rule.local is not None
        boxes = self.computed[node.output]
        return tuple(None if box.is_empty else rule.local(node, graph, box) for box in boxes)

    def _find_needed(self, index: int) -> None:
        """Adds what one node reads to what its group needs of each value."""
        node, group = self.graph.nodes[index], self.groups[index]
        for position, name in enumerate(node.refs):
            if name not in self.spread:
                continue
            nothing = self.nothing(name)
            reads = tuple(
                self.widened(name, local.reads[position].box) if local else empty
                for local, empty in zip(self.locals[index], nothing, strict=True)
            )
            self.needed[group, name] = _hulls(self.needed.get((group, name), nothing), reads)


def _hulls(ones: Boxes, others: Boxes) -> Boxes:
    return tuple(one.hull(other) for one, other in zip(ones, others, strict=True))

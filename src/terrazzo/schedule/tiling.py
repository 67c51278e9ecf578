"""The backward walk: which box of every value each device computes, and needs from outside.

A group's outputs are owned by tiles; each operator's rule says what its inputs need, and the hull
of all that is what a device computes. Where statistics, reductions or a gather read a value, the
tile a device owns is added to what it needs: a row that no window reads still counts in a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.errors import PlanError
from terrazzo.geometry import Box, cut
from terrazzo.graph.rules import (
    LOCAL,
    NORM,
    REDUCE,
    SUM,
    WHOLE,
    Axes,
    Letters,
    Local,
    Placement,
    place,
    rule_for,
)
from terrazzo.graph.rules.rule import blank
from terrazzo.graph.rules.windows import sums_channels
from terrazzo.records import Graph, Layout, Node, Plan, Ref

Boxes = tuple[Box, ...]


def owned(shape: Sequence[int], axes: Axes, layout: Layout, *, everywhere: str = "") -> Boxes:
    """Who owns which element: a disjoint cover by tiles.

    Along an axis that the value does not have, only the first device of a row of the grid owns;
    along the axes of ``everywhere``, all devices of a row have all of it.
    """
    boxes = [Box.whole(shape)]
    for axis, shares in layout.cuts:
        dim = axes.find(axis)
        if axis in everywhere:
            boxes = [box for box in boxes for _ in shares]
        elif dim >= 0:
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


def placements(graph: Graph, plan: Plan) -> tuple[list[Placement], dict[str, Letters]]:
    """How each node runs under its group's layout; the letters of every value by axes cut."""
    groups = group_of_nodes(graph, plan)
    masks = dict.fromkeys(group.layout.letters for group in plan.groups)
    letters = {mask: letters_under(graph, mask) for mask in masks}
    inside = {node.output: group for node, group in zip(graph.nodes, groups, strict=True)}
    placed: list[Placement] = []
    roles: dict[str, str] = {}
    for node, number in zip(graph.nodes, groups, strict=True):
        group = plan.groups[number]
        placement = place(node, graph, letters[group.layout.letters])
        alone = plan.devices == 1 and not group.passes
        if group.layout.is_whole or alone:
            placement = Placement(WHOLE, placement.axes)
        elif placement.role == LOCAL and adds_up(node, letters[group.layout.letters]):
            near = inside.get(node.refs[0]) == number and roles[node.refs[0]] in (LOCAL, NORM, SUM)
            placement = Placement(SUM, placement.axes) if near else placement
        elif node.op == "terrazzo.moments" and group.passes:
            placement = Placement(REDUCE, blank(node, graph))  # a strip has not all of a channel
        placed.append(placement)
        roles[node.output] = placement.role
    return placed, letters


def letters_under(graph: Graph, mask: str) -> Letters:
    """The letters of every value, were the whole model cut along these axes."""
    found = Letters(mask, {n: "." * len(value.shape) for n, value in graph.values.items()})
    for name in graph.inputs:
        if name and len(graph.shape(name)) == 4:
            found[name] = "".join(axis if axis in mask else "." for axis in "nchw")
    for node in graph.nodes:
        found[node.output] = place(node, graph, found).axes
    return found


def adds_up(node: Node, letters: Letters) -> bool:
    """Whether a product could sum over channels that it reads in parts."""
    rule = rule_for(node.op)
    if rule is None or rule.sums is None or "c" not in letters[node.refs[0]]:
        return False
    return "conv" not in node.op or sums_channels(node)


class Tiling:
    """Boxes of every value under one plan."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.groups = group_of_nodes(graph, plan)
        self.placed, self.letters = placements(graph, plan)
        self.spread = {
            node.output
            for node, placement in zip(graph.nodes, self.placed, strict=True)
            if placement.role in (LOCAL, SUM)
        } | {name for name in graph.inputs if name and len(graph.shape(name)) == 4}
        self.computed: dict[str, Boxes] = {}
        self.needed: dict[tuple[int, str], Boxes] = {}
        self.locals: dict[int, tuple[Local | None, ...]] = {}
        self.addends: dict[str, Boxes] = {}
        """For a sum over channels: what each device has a part of the sum of."""
        self._walk()

    def axes(self, name: str, group: int) -> Axes:
        """The letters of a value under the layout of a group."""
        return self.letters[self.plan.groups[group].layout.letters][name]

    def tiles(self, name: str, group: int) -> Boxes:
        """Who owns which element of a value in the layout of a group."""
        layout = self.plan.groups[group].layout
        return owned(self.graph.shape(name), self.axes(name, group), layout)

    def made_tiles(self, name: str) -> Boxes:
        """The tiles of a value in the group that makes it."""
        return self.tiles(name, self.groups[self.graph.producer[name]])

    def nothing(self, name: str) -> Boxes:
        return (Box.empty(len(self.graph.shape(name))),) * self.plan.devices

    def widened(self, name: str, box: Box, group: int) -> Box:
        """A box that is whole along every dimension that is not cut, as operators expect."""
        return widened(box, self.axes(name, group), self.graph.shape(name))

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
        if self.placed[index].role == SUM:
            return self._addends(index)
        if self.placed[index].role == REDUCE:
            assert rule.reduce is not None
            reduction = rule.reduce(node, graph)
            boxes = self.tiles(node.refs[reduction.main], self.groups[index])
            return tuple(None if box.is_empty else reduction.partial(box) for box in boxes)
        assert rule.local is not None
        boxes = self.computed[node.output]
        return tuple(None if box.is_empty else rule.local(node, graph, box) for box in boxes)

    def _addends(self, index: int) -> tuple[Local | None, ...]:
        """Every device sums over the channels that it has, for all channels of the result."""
        node, group = self.graph.nodes[index], self.groups[index]
        rule, source = rule_for(node.op), node.refs[0]
        assert rule is not None and rule.sums is not None
        layout, dim = self.plan.groups[group].layout, self.axes(source, group).find("c")
        letters, shape = self.axes(node.output, group), self.graph.shape(node.output)
        boxes = owned(shape, letters, layout, everywhere="c")
        mine = owned(self.graph.shape(source), self.axes(source, group), layout)
        found = tuple(
            None
            if box.is_empty or own.is_empty
            else rule.sums(node, self.graph, box, own.spans[dim])
            for box, own in zip(boxes, mine, strict=True)
        )
        self.addends[node.output] = tuple(
            box if local else Box.empty(box.rank) for box, local in zip(boxes, found, strict=True)
        )
        return found

    def _find_needed(self, index: int) -> None:
        """Adds what one node reads to what its group needs of each value."""
        node, group = self.graph.nodes[index], self.groups[index]
        for position, name in enumerate(node.refs):
            if name not in self.spread:
                continue
            nothing = self.nothing(name)
            reads = tuple(
                self.widened(name, local.reads[position].box, group) if local else empty
                for local, empty in zip(self.locals[index], nothing, strict=True)
            )
            self.needed[group, name] = _hulls(self.needed.get((group, name), nothing), reads)


def _hulls(ones: Boxes, others: Boxes) -> Boxes:
    return tuple(one.hull(other) for one, other in zip(ones, others, strict=True))


def widened(box: Box, axes: Axes, shape: tuple[int, ...]) -> Box:
    """The box made whole along every dimension without a letter."""
    for dim, letter in enumerate(axes):
        if letter == "." and not box.is_empty:
            box = box.replace(dim, (0, shape[dim]))
    return box

"""The forward walk: operators collect in a Compute until something must cross devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from terrazzo.errors import PlanError
from terrazzo.geometry import Box, transfers
from terrazzo.geometry.box import hull
from terrazzo.graph.expand import expand_norms
from terrazzo.graph.rules import LOCAL, NORM, REDUCE, SUM, WHOLE, Local, rule_for
from terrazzo.records import Graph, Plan, Ref
from terrazzo.records.graph import fingerprint
from terrazzo.schedule.arrivals import meet_once
from terrazzo.schedule.homes import Homes, homes, owners
from terrazzo.schedule.passes import chain, materialised, strips
from terrazzo.schedule.program import (
    Apply,
    Array,
    Combine,
    Compute,
    Exchange,
    Move,
    Passes,
    Program,
    Spread,
    Step,
    Take,
)
from terrazzo.schedule.tiling import Boxes, Tiling, placements

WEIGHT_BYTES = 1 << 20
"""A Compute ends when the weights it uses reach this: their gradients can then be summed over the
devices while the backward pass goes on."""


def lower(graph: Graph, plan: Plan, kept: Mapping[str, Boxes] | None = None) -> Program:
    """The program of a plan for its graph.

    ``kept`` says how parameters (by their names in the model) are cut already; without it, they
    are cut as this plan uses them.
    """
    if plan.graph != graph.digest:
        raise PlanError(
            f"the plan was made for model {plan.graph}, this one (or its input shape, or its "
            f"mode) is {graph.digest}: make a plan for it with tz.plan"
        )
    for position, group in enumerate(plan.groups):
        if not group.layout.is_whole and group.layout.devices != plan.devices:
            raise PlanError(
                f"group {position} of the plan is cut for {group.layout.devices} devices "
                f"({group.layout}), the plan is for {plan.devices}"
            )
    placed, _ = placements(graph, plan)
    norms = {index for index, placement in enumerate(placed) if placement.role == NORM}
    tiling = Tiling(expand_norms(graph, norms), plan)
    if kept is None:
        return Lowering(tiling, homes(tiling)).program()
    names = {
        value.target: name for name, value in graph.values.items() if value.kind == "parameter"
    }
    return Lowering(tiling, {names[t]: boxes for t, boxes in kept.items() if t in names}).program()


class Lowering:
    """The state of one forward walk."""

    def __init__(self, tiling: Tiling, homes: Homes) -> None:
        self.tiling, self.graph, self.plan, self.homes = tiling, tiling.graph, tiling.plan, homes
        self.arrays: dict[str, Array] = {}
        self.steps: list[Step] = []
        self.pending: list[Apply] = []
        self.pending_group = 0
        self.pending_bytes = 0
        self.bound: dict[tuple[str, int | str], str] = {}
        self.given: dict[str, Boxes] = {}

    def program(self) -> Program:
        group, late = -1, _unawaited(self.graph)  # emitted at the end
        for index, next_group in enumerate(self.tiling.groups):
            if next_group != group:
                group = next_group
                self._enter(group)
            if index not in late:
                self._emit(index)
        last = max(group, 0)
        self._gather([name for i in late for name in self.graph.nodes[i].refs], last)
        for index in late:
            self._emit(index)
        results = [argument for argument in self.graph.outputs if isinstance(argument, Ref)]
        names = [*(ref.name for ref in results), *self.graph.mutations.values()]
        self._gather(names, last)
        outputs = {name: self._whole(name, last) for name in names}
        self._flush()
        homes = {name: boxes for name, boxes in self.homes.items() if name in self.arrays}
        return Program(
            self.graph, self.plan, self.arrays, meet_once(self.steps), outputs, self.given, homes
        )

    def _flush(self) -> None:
        if self.pending:
            self.steps.append(Compute(tuple(self.pending), self.pending_group))
            self.pending, self.pending_bytes = [], 0

    def _step(self, step: Step) -> None:
        self._flush()
        self.steps.append(step)

    def _append(self, apply: Apply, group: int) -> None:
        if not self.pending:
            self.pending_group = group
        self.pending.append(apply)
        self.pending_bytes += sum(
            self.graph.values[name].bytes
            for name in self.graph.nodes[apply.node].refs
            if self.graph.values[name].kind == "parameter"
        )
        if self.pending_bytes >= WEIGHT_BYTES and self.plan.devices > 1:
            self._flush()

    def _array(self, name: str, value: str, boxes: Boxes | None) -> str:
        self.arrays[name] = Array(name, value, boxes)
        return name

    def _enter(self, group: int) -> None:
        """Brings every spread value that a group needs from outside, in one exchange."""
        moves = []
        for (reader, name), needed in self.tiling.needed.items():
            producer = self.graph.producer.get(name)
            if reader != group or (producer is not None and self.tiling.groups[producer] == group):
                continue
            if producer is None:
                self._take(name, group, needed)
            elif name in self.arrays:  # or it is computed again where it is read
                moves.append((name, needed))
        made = [self._move(name, group, needed) for name, needed in sorted(moves)]
        if any(made):
            self._step(Exchange(tuple(move for move in made if move), group))

    def _take(self, name: str, group: int, needed: Boxes) -> None:
        target = self._array(f"{name}@{group}", name, needed)
        self.bound[name, group] = target
        self._hand_over(name, needed)
        self._step(Take(self._leaf(name), target))

    def _hand_over(self, name: str, needed: Boxes) -> None:
        """Notes what the devices must be given of an input."""
        rank = len(self.graph.shape(name))
        before = self.given.get(name, self.tiling.nothing(name))
        self.given[name] = tuple(hull(pair, rank) for pair in zip(before, needed, strict=True))

    def _move(self, name: str, group: int, needed: Boxes) -> Move | None:
        """None when every device already holds what it needs."""
        held = self.arrays[name].boxes
        assert held is not None
        if all(have.contains(need) for have, need in zip(held, needed, strict=True)):
            self.bound[name, group] = name
            return None
        target = self._array(f"{name}@{group}", name, needed)
        self.bound[name, group] = target
        return Move(name, target, transfers(self.tiling.made_tiles(name), needed))

    def _leaf(self, name: str) -> str:
        """The array of a value that is not spread: computed, or given by caller or model."""
        return name if name in self.arrays else self._array(name, name, self.homes.get(name))

    def _whole(self, name: str, group: int) -> str:
        """A value as a whole array, gathered if it is spread."""
        if name in self.homes:
            return self._whole_weight(name, group)
        if name not in self.tiling.spread:
            return self._leaf(name)
        if name not in self.graph.producer:
            everything = (Box.whole(self.graph.shape(name)),) * self.plan.devices
            self._hand_over(name, everything)
            return self._leaf(name)
        self._gather([name], group)
        return self.bound[name, "whole"]

    def _gather(self, names: Sequence[str], group: int) -> None:
        """Brings spread values together on every device, in one exchange."""
        moves = []
        for name in dict.fromkeys(names):
            made = name in self.tiling.spread and name in self.graph.producer
            if made and (name, "whole") not in self.bound:
                everything = (Box.whole(self.graph.shape(name)),) * self.plan.devices
                target = self._array(f"{name}*", name, None)
                moved = transfers(self.tiling.made_tiles(name), everything)
                moves.append(Move(name, target, moved))
                self.bound[name, "whole"] = target
        if moves:
            self._step(Exchange(tuple(moves), group))

    def _weight(self, name: str, needed: Boxes, group: int) -> str:
        """A cut weight where this plan uses other boxes of it than devices hold: it is sent."""
        home = self.homes[name]
        if all(have.contains(need) for have, need in zip(home, needed, strict=True)):
            return self._spread(name)
        key = f"{name}@{fingerprint(needed)}"
        if (key, "weight") not in self.bound:
            target = self._array(key, name, needed)
            moved = transfers(owners(home), needed)
            self._step(Exchange((Move(self._spread(name), target, moved),), group))
            self.bound[key, "weight"] = target
        return self.bound[key, "weight"]

    def _whole_weight(self, name: str, group: int) -> str:
        """All of a cut weight on every device; its gradient is complete on each of them, and each
        takes its part of it."""
        if (name, "whole") not in self.bound:
            everything = (Box.whole(self.graph.shape(name)),) * self.plan.devices
            target = self._array(f"{name}*", name, None)
            moved = transfers(owners(self.homes[name]), everything)
            self._step(Exchange((Move(self._spread(name), target, moved),), group))
            self.bound[name, "whole"] = target
        return self.bound[name, "whole"]

    def _boxed(self, name: str, group: int, needed: Boxes) -> str:
        """A value as a split node of a group reads it."""
        if name in self.homes:
            return self._weight(name, needed, group)
        if name in self.tiling.spread:
            producer = self.graph.producer.get(name)
            inside = producer is not None and self.tiling.groups[producer] == group
            alone = self.plan.devices == 1 and producer is not None
            return name if inside or alone else self.bound[name, group]
        return self._spread(name)

    def _spread(self, name: str) -> str:
        """What every device holds alike, used by each for its part."""
        if (name, "spread") not in self.bound:
            if any(name in apply.outputs for apply in self.pending):
                self._flush()
            source = self._leaf(name)
            target = self._array(f"{name}~", name, self.arrays[source].boxes)
            self.steps.append(Spread(source, target))  # sends nothing: a pending Compute goes on
            self.bound[name, "spread"] = target
        return self.bound[name, "spread"]

    def _emit(self, index: int) -> None:
        node, group = self.graph.nodes[index], self.tiling.groups[index]
        role = self.tiling.placed[index].role
        if role == WHOLE:
            inputs = tuple(self._whole(name, group) for name in node.refs)
            outputs = tuple(name and self._array(name, name, None) for name in node.outputs)
            self._append(Apply(index, inputs, outputs), group)
            return
        if role == LOCAL and self.plan.groups[group].passes:
            self._emit_passes(index)
            return
        inputs = self._inputs(index, self.tiling.locals[index])
        if role == REDUCE:
            self._emit_combine(index, inputs)
        elif role == SUM:
            self._emit_sum(index, inputs)
        else:
            boxes = self.tiling.computed[node.output]
            output = self._array(node.output, node.output, boxes)
            self._append(Apply(index, inputs, (output,), self.tiling.locals[index]), group)

    def _inputs(self, index: int, locals_: Sequence[Local | None]) -> tuple[str, ...]:
        """The arrays that a split node reads."""
        node, group = self.graph.nodes[index], self.tiling.groups[index]
        return tuple(
            self._boxed(
                name,
                group,
                tuple(
                    local.reads[position].box if local else Box.empty(len(self.graph.shape(name)))
                    for local in locals_
                ),
            )
            for position, name in enumerate(node.refs)
        )

    def _emit_sum(self, index: int, inputs: tuple[str, ...]) -> None:
        """Each device adds up over its channels; then the parts are sent to where they belong."""
        node, group = self.graph.nodes[index], self.tiling.groups[index]
        name, parts = node.output, self.tiling.addends[node.output]
        addends = self._array(f"{name}+", name, parts)
        self._append(Apply(index, inputs, (addends,), self.tiling.locals[index]), group)
        wanted = self.tiling.computed[name]
        target = self._array(name, name, wanted)
        move = Move(addends, target, transfers(parts, wanted), adds=True)
        self._step(Exchange((move,), group))

    def _emit_passes(self, index: int) -> None:
        """A heavy node, or one whose result leaves the group, with the cheap nodes before it."""
        if not materialised(self.tiling, index):
            return
        group, nodes = self.tiling.groups[index], chain(self.tiling, index)
        inside = {self.graph.nodes[i].output for i in nodes}
        inputs = tuple(
            tuple(
                "" if name in inside else array
                for name, array in zip(
                    self.graph.nodes[i].refs,
                    self._inputs(i, self.tiling.locals[i]),
                    strict=True,
                )
            )
            for i in nodes
        )
        target = self.graph.nodes[index].output
        boxes = self.tiling.computed[target]
        passes = self.plan.groups[group].passes
        cut = tuple(strips(self.tiling, nodes, box=box, passes=passes) for box in boxes)
        self._array(target, target, boxes)
        self._step(Passes(nodes, inputs, target, cut, group))

    def _emit_combine(self, index: int, inputs: tuple[str, ...]) -> None:
        node, group = self.graph.nodes[index], self.tiling.groups[index]
        rule = rule_for(node.op)
        assert rule is not None and rule.reduce is not None
        reduction = rule.reduce(node, self.graph)
        boxes = self.tiling.tiles(node.refs[reduction.main], group)
        places = tuple(
            Box.empty(len(reduction.shape)) if box.is_empty else reduction.keeps(box)
            for box in boxes
        )
        target = self._array(node.output, node.output, None)
        parts = self.tiling.locals[index]
        self._step(Combine(index, inputs, target, parts, places, reduction, group))


def _unawaited(graph: Graph) -> list[int]:
    """New running statistics that nothing waits for but others of the kind: a norm that is used
    again reads them, where that use runs whole."""
    awaited: set[str] = set()
    late: list[int] = []
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if node.op == "terrazzo.running" and awaited.isdisjoint(node.outputs):
            late.append(index)
        else:
            awaited.update(node.refs)
    return late[::-1]

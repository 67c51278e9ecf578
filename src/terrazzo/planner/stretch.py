"""A stretch: a run of operators in one layout, tiled and priced by itself.

A search looks at thousands of them, so nothing outside of the run is touched: what enters it is a
list of boxes, and what bringing them costs is up to the layout before.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from terrazzo.geometry import Box
from terrazzo.graph.expand import expand_norms
from terrazzo.graph.rules import (
    LOCAL,
    NORM,
    REDUCE,
    SUM,
    WHOLE,
    Letters,
    Local,
    Placement,
    place,
    rule_for,
)
from terrazzo.planner.cost import LATE
from terrazzo.planner.prices import NOTE_BYTES, Prices
from terrazzo.planner.rates import Seconds
from terrazzo.records import Graph, Group, Layout, Plan, Ref
from terrazzo.records.graph import BYTES
from terrazzo.records.profile import OPERATOR, SUMMED
from terrazzo.schedule import Combine, Compute, Exchange, Step
from terrazzo.schedule.gradient import STOPS
from terrazzo.schedule.homes import is_cut, sharers
from terrazzo.schedule.sums import SMALL_BYTES
from terrazzo.schedule.tiling import Boxes, Tiling, adds_up, letters_under, owned

Numbers = NDArray[np.float64]

HIDDEN = 0.7
"""Part of sending gradients back that making gradients of weights can hide. An estimate for the
search alone; plans that it finds are simulated as a whole."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a run costs in one layout, and the boxes that each device needs from before it.

    ``work_s`` is what everybody waits for: computing on the slowest device, and messages inside.
    ``sums_s`` is how long links are busy with weight gradients, which may go unnoticed.
    """

    work_s: float
    sums_s: float
    late_s: float
    """Gradients of the first weights, which are made while what entered is sent back."""
    enters: tuple[tuple[str, Boxes | None], ...]


class Ground:
    """A graph made ready for pricing its stretches: norms apart, letters found once per mask."""

    def __init__(self, graph: Graph, prices: Prices) -> None:
        self.prices = prices
        self.norms = norms = set[int]()
        """Where in the graph as it is shown; in ``graph`` they are statistics and arithmetic."""
        for mask in ("hw", "n", "c"):
            found = letters_under(graph, mask)
            norms |= {i for i, n in enumerate(graph.nodes) if place(n, graph, found).role == NORM}
        self.graph = expand_norms(graph, norms)
        self.letters: dict[str, Letters] = {}
        self.roles: dict[str, list[Placement]] = {}
        self.adds: dict[str, set[int]] = {}
        self.trained = prices.training.weights(graph)
        self.carries = _carriers(self.graph, self.trained)
        self._tiles: dict[tuple[str, Layout], Boxes] = {}
        self._locals: dict[tuple[int, Box], Local] = {}
        net = prices.network
        if net is not None:
            self.up = np.array([link.up_bytes_per_s for link in net.links])
            self.down = np.array([link.down_bytes_per_s for link in net.links])
            self.met_s = min(prices.notes_s(NOTE_BYTES), prices.latency_s(0))
            """What it saves, one way, not to meet for a norm and for its edges."""
            self.latency = np.array([prices.latency_s(d) for d in range(prices.devices)])
            self.message = np.array([prices.message_s(d) for d in range(prices.devices)])
            self.byte = np.array([prices.byte_s(d) for d in range(prices.devices)])
        self.copy = np.array([1 / prices.copy_s(1.0, d) for d in range(prices.devices)])

    def mask(self, letters: str) -> tuple[Letters, list[Placement], set[int]]:
        """Letters and roles of everything under layouts that cut these axes."""
        if letters not in self.letters:
            found = letters_under(self.graph, letters)
            self.letters[letters] = found
            self.roles[letters] = [place(node, self.graph, found) for node in self.graph.nodes]
            self.adds[letters] = {
                index
                for index, node in enumerate(self.graph.nodes)
                if self.roles[letters][index].role == LOCAL and adds_up(node, found)
            }
        return self.letters[letters], self.roles[letters], self.adds[letters]

    def tiles(self, name: str, layout: Layout) -> Boxes:
        """Who owns what of a value that was made in a layout."""
        if (name, layout) not in self._tiles:
            letters, shape = self.mask(layout.letters)[0][name], self.graph.shape(name)
            whole = (Box.whole(shape),) * self.prices.devices
            made = whole if layout.is_whole else owned(shape, letters, layout)
            self._tiles[name, layout] = made
        return self._tiles[name, layout]

    def local(self, index: int, box: Box) -> Local | None:
        if box.is_empty:
            return None
        if (index, box) not in self._locals:
            rule = rule_for(self.graph.nodes[index].op)
            assert rule is not None and rule.local is not None
            self._locals[index, box] = rule.local(self.graph.nodes[index], self.graph, box)
        return self._locals[index, box]

    def size(self, name: str) -> int:
        return BYTES[self.graph.values[name].dtype]

    # ---- messages ------------------------------------------------------------------------

    def volumes(self, have: Numbers, need: Numbers) -> Numbers:
        """Elements from each source (second last) to each destination (last), for many at once."""
        low = np.maximum(have[..., :, None, :, 0], need[..., None, :, :, 0])
        high = np.minimum(have[..., :, None, :, 1], need[..., None, :, :, 1])
        found: Numbers = np.clip(high - low, 0, None).prod(-1)
        return found

    def moved_s(self, sizes: Numbers) -> Numbers:
        """Seconds of an exchange, from bytes by source and destination."""
        sizes = sizes * (1.0 - np.eye(sizes.shape[-1]))
        out, into = sizes.sum(-1), sizes.sum(-2)
        count = (sizes > 0).sum(-1) + (sizes > 0).sum(-2)
        if self.prices.shared:
            wire = np.broadcast_to(sizes.sum((-1, -2))[..., None] / self.prices.medium, out.shape)
        else:
            wire = np.maximum(out / self.up, into / self.down)
        busy = np.maximum(wire, (out + into) * self.byte)
        each = count * self.message + busy + (out + into) / self.copy + self.latency * (count > 0)
        found: Numbers = each.max(-1)
        return found


def corners(boxes: Boxes) -> Numbers:
    return np.array([box.spans for box in boxes], dtype=np.float64)


class _Run(Tiling):
    """The tiling of one stretch alone: group 0 of a plan of one group, the rest is elsewhere."""

    def __init__(self, ground: Ground, layout: Layout, first: int, last: int) -> None:
        self.ground, self.graph, self.first, self.last = ground, ground.graph, first, last
        end = self.graph.nodes[last].output
        self.plan = Plan("", ground.prices.devices, (Group(end, layout),))
        letters, roles, adds = ground.mask(layout.letters)
        self.letters = {layout.letters: letters}
        self.groups = [1] * len(roles)
        self.groups[first : last + 1] = [0] * (last + 1 - first)
        self.placed = self._roles(roles, adds)
        self.spread = _Spread(self, letters)
        self.computed, self.needed, self.locals, self.addends = {}, {}, {}, {}
        self._walk()

    def _roles(self, roles: Sequence[Placement], adds: set[int]) -> list[Placement]:
        placed = list(roles)
        if self.plan.groups[0].layout.is_whole:
            return [Placement(WHOLE, p.axes) for p in placed]
        for index in range(self.first, self.last + 1):
            producer = (
                self.graph.producer.get(self.graph.nodes[index].refs[0], -1)
                if (index in adds)
                else -1
            )
            if producer >= self.first and placed[producer].role in (LOCAL, NORM, SUM):
                placed[index] = Placement(SUM, placed[index].axes)
        return placed

    def _walk(self) -> None:
        for index in range(self.last, self.first - 1, -1):
            role, node = self.placed[index].role, self.graph.nodes[index]
            if role == WHOLE:
                continue
            if role != REDUCE:
                self._find_computed(node.output, 0)
            if role == LOCAL:
                boxes = self.computed[node.output]
                self.locals[index] = tuple(self.ground.local(index, box) for box in boxes)
            else:
                self.locals[index] = self._locals(index)
            self._find_needed(index)


class _Spread(set[str]):
    """Values that lie in boxes: results of split operators, and maps from before the run."""

    def __init__(self, run: _Run, letters: Letters) -> None:
        self.run, self.letters = run, letters

    def __contains__(self, name: object) -> bool:
        run, key = self.run, str(name)
        producer = run.graph.producer.get(key)
        if producer is not None and producer >= run.first:
            return run.placed[producer].role in (LOCAL, SUM)
        return run.graph.values[key].kind in ("node", "input") and len(run.graph.shape(key)) == 4


def price(ground: Ground, layout: Layout, *, first: int, last: int) -> Stretch:
    """One run of operators (of the ground's graph) in one layout, forward and backward."""
    return _Priced(ground, _Run(ground, layout, first, last)).stretch()


class _Priced:
    def __init__(self, ground: Ground, run: _Run) -> None:
        self.ground, self.run, self.prices = ground, run, ground.prices
        self.graph, self.devices = ground.graph, range(ground.prices.devices)
        self.seconds = [0.0] * len(self.devices)
        self.inside_s = 0.0
        self.inside_back_s = 0.0
        self.by_weight: list[list[float]] = []
        self.weights: dict[str, Boxes | None] = {}
        self.wholes: list[str] = []

    def stretch(self) -> Stretch:
        for index in range(self.run.first, self.run.last + 1):
            if self.graph.nodes[index].op != "terrazzo.running":
                self._node(index)
        enters: list[tuple[str, Boxes | None]] = []
        for name in dict.fromkeys(self.wholes):
            producer = self.graph.producer.get(name)
            if producer is not None and producer < self.run.first:
                enters.append((name, None))
            elif producer is not None and name in self.run.spread:
                self._gather(name)
        for (_, name), boxes in self.run.needed.items():
            producer = self.graph.producer.get(name)
            if producer is not None and producer < self.run.first:
                enters.append((name, boxes))
        self._step(Compute)
        if enters:
            self._step(Exchange)
        sums_s, stolen_s = self._sums()
        late = [max(each) for each in self.by_weight]
        back_s = self.inside_back_s - min(HIDDEN * self.inside_back_s, sum(late[1:]))
        work_s = max(map(float.__add__, self.seconds, stolen_s)) + self.inside_s + back_s
        return Stretch(work_s, sums_s, late[0] if late else 0.0, tuple(enters))

    # ---- operators -----------------------------------------------------------------------

    def _node(self, index: int) -> None:
        node, role = self.graph.nodes[index], self.run.placed[index].role
        by_weight = any(n in self.ground.trained for n in node.refs)
        by_input = any(n in self.ground.carries for n in node.refs)
        if role == WHOLE:
            self.wholes += [n for n in node.refs if n in self.run.spread]
            self._weigh(index, None)
            for device in self.devices:
                self._add(device, self.prices.whole(node, self.graph, device), by_input, by_weight)
            return
        locals_ = self.run.locals[index]
        self._weigh(index, locals_)
        boxes = self._made(index, role)
        late = [0.0] * len(self.devices)
        for device, local in enumerate(locals_):
            if local is not None:
                cost = self.prices.local(local, boxes[device], device)
                late[device] = cost.backward_weight_s
                self._add(device, cost, by_input, by_weight)
        if node.op == LATE and by_weight:
            self.by_weight.append(late)
        if role == REDUCE:
            seconds = self.prices.joint_s(prod(self.graph.shape(node.output)) * 4)
            self._step(Combine)
            self._meet(prod(self.graph.shape(node.output)) * 4)
            self.inside_s += seconds
            if node.output in self.ground.carries or by_input:
                self.inside_back_s += seconds
                for device in self.devices:
                    self.seconds[device] += self.prices.own_s(SUMMED, device)[1]
                self._meet(prod(self.graph.shape(node.output)) * 4)
        elif role == SUM:
            self._step(Exchange)
            self._sum(node.output, by_input or by_weight)

    def _step(self, kind: type[Step]) -> None:
        """The runtime's own part of a step, there and back."""
        for device in self.devices:
            self.seconds[device] += sum(self.prices.own_s(kind.__name__, device))

    def _meet(self, payload_bytes: int) -> None:
        """What a sum that everybody waits for takes of processors."""
        for device in self.devices:
            self.seconds[device] += self.prices.joint_cpu_s(payload_bytes, device)

    def _made(self, index: int, role: str) -> Boxes:
        node = self.graph.nodes[index]
        if role == REDUCE:
            rule = rule_for(node.op)
            assert rule is not None and rule.reduce is not None
            reduction = rule.reduce(node, self.graph)
            tiles = self.run.tiles(node.refs[reduction.main], 0)
            return tuple(tile if tile.is_empty else reduction.keeps(tile) for tile in tiles)
        return self.run.addends[node.output] if role == SUM else self.run.computed[node.output]

    def _add(self, device: int, cost: Seconds, by_input: bool, by_weight: bool) -> None:
        self.seconds[device] += (
            cost.forward_s
            + (cost.backward_input_s if by_input else 0.0)
            + (cost.backward_weight_s if by_weight else 0.0)
            + sum(self.prices.own_s(OPERATOR, device))
        )

    # ---- messages ------------------------------------------------------------------------

    def _sum(self, name: str, live: bool) -> None:
        have, need = corners(self.run.addends[name]), corners(self.run.computed[name])
        sizes = self.ground.volumes(have, need) * self.ground.size(name)
        self._messages(sizes, live)

    def _gather(self, name: str) -> None:
        """A value made inside, needed whole inside; its gradient is complete on every device."""
        have = corners(self.run.tiles(name, 0))
        need = corners((Box.whole(self.graph.shape(name)),) * len(self.devices))
        self._messages(self.ground.volumes(have, need) * self.ground.size(name), live=False)

    def _messages(self, sizes: Numbers, live: bool) -> None:
        if self.prices.network is None:
            return
        self.inside_s += float(self.ground.moved_s(sizes))
        if live:
            self.inside_back_s += float(self.ground.moved_s(sizes.swapaxes(-1, -2)))

    # ---- weights -------------------------------------------------------------------------

    def _weigh(self, index: int, locals_: Sequence[Local | None] | None) -> None:
        """Notes which box of each trained weight every device uses; None: whole."""
        for position, name in enumerate(self.graph.nodes[index].refs):
            value = self.graph.values[name]
            if name not in self.ground.trained:
                continue
            used: Boxes | None = None
            if locals_ is not None:
                rank = len(value.shape)
                used = tuple(
                    local.reads[position].box if local else Box.empty(rank) for local in locals_
                )
            self.weights[name] = used

    def _sums(self) -> tuple[float, list[float]]:
        """Link time of weight gradients, and what they and the optimiser take of processors."""
        sums_s, stolen = 0.0, [0.0] * len(self.devices)
        circles: dict[tuple[int, ...], int] = {}
        everyone = tuple(self.devices)
        for name, boxes in self.weights.items():
            value = self.graph.values[name]
            if boxes is None:  # computed alike on every device, and the gradient is complete
                self._update(stolen, everyone, prod(value.shape))
                continue
            if not is_cut(boxes, value.shape):
                boxes = (Box.whole(value.shape),) * len(self.devices)
            for circle in dict.fromkeys(sharers(boxes)):
                if circle:
                    size = boxes[circle[0]].size
                    circles[circle] = circles.get(circle, 0) + size * self.ground.size(name)
                    self._update(stolen, circle, size)
        for circle, amount in circles.items():
            if len(circle) > 1:
                share = len(circle) / len(self.devices)
                # Sums are made in buckets of several stretches: rounds are paid by few of them.
                sums_s += share * self._sum_s(amount, len(circle))
                for device in circle:
                    stolen[device] += amount * self.prices.byte_s(device) * 2
        return sums_s, stolen

    def _sum_s(self, amount: int, members: int) -> float:
        base = self.prices.sum_s(SMALL_BYTES, members)
        return max(0.0, self.prices.sum_s(amount + SMALL_BYTES, members) - base)

    def _update(self, stolen: list[float], circle: Sequence[int], elements: int) -> None:
        for device in circle:
            stolen[device] += self.prices.update_s(elements, device)


def _carriers(graph: Graph, trained: Set[str]) -> frozenset[str]:
    """Values made with trained weights: a gradient goes through them."""
    found: set[str] = set()
    for node in graph.nodes:
        if not node.gradient or node.op in STOPS:
            continue
        for name in node.refs:
            if name in found or name in trained:
                found |= {out for out in node.outputs if out}
                break
    return frozenset(found)


def results(graph: Graph) -> list[str]:
    """Values that every device holds whole at the end."""
    return [ref.name for ref in graph.outputs if isinstance(ref, Ref)]

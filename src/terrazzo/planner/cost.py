"""The cost of a program: one training step, simulated with prices in place of work.

The walk does what the runtime does: forward through the steps, then back, every device with a clock
of its own. Weight gradients are summed beside the backward pass, in buckets, over those who hold
the same part of a weight. Where one device reads the data, a step begins with sending every other
its box of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from terrazzo.geometry import Box
from terrazzo.planner.clocks import Clocks, Message
from terrazzo.planner.prediction import GroupCost, Prediction, bottleneck
from terrazzo.planner.prices import NOTE_BYTES, Prices
from terrazzo.planner.rates import Seconds
from terrazzo.records.graph import BYTES
from terrazzo.records.profile import OPERATOR, SUMMED, Profile
from terrazzo.schedule import (
    Apply,
    Arrive,
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
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.lifetimes import Lifetimes
from terrazzo.schedule.memory import footprints
from terrazzo.schedule.sums import Waiting, summed_bytes

READER = 0
"""The device that reads the data, unless a script says otherwise."""
LATE = "aten.conv2d.default"
"""The operator whose gradient by weight is made while messages are on their way."""


def predict(program: Program, profile: Profile | Prices, *, memory: bool = True) -> Prediction:
    """One training step of a program on the devices of a profile."""
    prices = profile if isinstance(profile, Prices) else Prices(profile)
    walk = _Walk(program, prices)
    step_s = walk.run()
    feet: tuple[int, ...] = ()
    if memory:
        feet = tuple(f.total_bytes for f in footprints(program, training=prices.training))
    return walk.prediction(step_s, feet)


def _arriving(step: Step) -> tuple[str, ...]:
    return step.targets if isinstance(step, Arrive) else ()


class _Walk:
    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices, self.graph = program, prices, program.graph
        self.devices = range(program.devices)
        self.clocks = Clocks(prices)
        self.trained = prices.training.weights(self.graph)
        self.live = prices.training.live(program)
        self.lives = Lifetimes(program)
        self.waiting = Waiting(summed_bytes(program, self.live))
        self.fills: list[Spread] = []
        self.begun = {s.writes: s.moves for s in program.steps if isinstance(s, Exchange)}
        self.group_sums = [0] * len(program.plan.groups)
        self.largest_sum: tuple[int, str] = (0, "")
        self.summed = [0] * program.devices
        self.weight_group = self._weight_groups()
        self.delivery_s, self.delivered_bytes = 0.0, 0

    def run(self) -> float:
        steps, clocks = self.program.steps, self.clocks
        self._deliver()
        clocks.enter(0)
        for device in self.devices:
            clocks.compute(device, self.prices.net_s(len(self.trained), device))
        self._agree()
        for step in steps:
            self._forward(step)
        self._agree()
        for index in reversed(range(len(steps))):
            for again in self.lives.rebuilt(index, self.live):
                self._forward(steps[again])
            self._backward(steps[index])
        self._catch_up()
        clocks.enter(-1)
        for circle in list(self.waiting.bytes):
            self._close(circle)
        clocks.finish()
        self._agree()
        for device in self.devices:
            clocks.compute(device, self.prices.update_s(self._own_weights(device), device))
        return max(clocks.now)

    def _deliver(self) -> None:
        """The note about a batch, what is in it, and every device's box of the input."""
        each = self.prices.delivered
        if not each or len(self.devices) == 1:
            return
        self.clocks.enter(-2)
        self._agree()
        self._agree()
        messages: list[Message] = []
        for name in self.graph.inputs:
            if not name:
                continue
            whole = (Box.whole(self.graph.shape(name)),) * len(self.devices)
            boxes = self.program.given.get(name, whole)
            messages += [
                (READER, device, boxes[device].size * each)
                for device in self.devices
                if device != READER and boxes[device].size
            ]
        self.clocks.depart(messages)
        self.clocks.arrive()
        self.delivered_bytes = sum(self.clocks.sent)
        self.clocks.sent = [0] * len(self.devices)  # what a step sends are maps and gradients
        self.delivery_s = max(self.clocks.now)

    def _agree(self) -> None:
        self.clocks.meet(self.prices.notes_s(NOTE_BYTES))

    def _own_weights(self, device: int) -> int:
        homes, values = self.program.homes, self.graph.values
        return sum(
            homes[name][device].size if name in homes else prod(values[name].shape)
            for name in self.trained
        )

    # ---- steps ---------------------------------------------------------------------------

    def _forward(self, step: Step) -> None:
        if isinstance(step, (Compute, Passes, Combine, Exchange, Arrive)):
            self.clocks.enter(step.group)
        for device in self.devices:
            seconds = self._own_s(step, device)[0]
            for cost in self._costs(step, device):
                seconds += cost.forward_s
            self.clocks.compute(device, seconds)
        if isinstance(step, Exchange):
            self._depart(step.moves, back=False)
        if isinstance(step, Arrive) or (isinstance(step, Exchange) and not step.ends_later):
            self.clocks.arrive()
        elif isinstance(step, Combine):
            self._meet(self._combined_bytes(step))

    def _own_s(self, step: Step, device: int) -> tuple[float, float]:
        """The runtime's own part of a step; that of its operators is among their costs."""
        if isinstance(step, Passes):
            return self.prices.own_s(Compute.__name__, device)
        summed = isinstance(step, Spread) and not self._is_weight(step.source)
        return self.prices.own_s(SUMMED if summed else type(step).__name__, device)

    def _meet(self, payload_bytes: int) -> None:
        """A sum that everybody waits for."""
        for device in self.devices:
            self.clocks.compute(device, self.prices.joint_cpu_s(payload_bytes, device))
        self.clocks.meet(self.prices.joint_s(payload_bytes))

    def _backward(self, step: Step) -> None:
        if isinstance(step, (Compute, Passes, Combine, Exchange, Arrive)):
            self.clocks.enter(step.group)
        if not any(name in self.live for name in (*step.writes, *_arriving(step))):
            return
        if isinstance(step, Arrive) or (isinstance(step, Exchange) and not step.ends_later):
            moves = step.moves if isinstance(step, Exchange) else self.begun[step.targets]
            if any(self._is_weight(move.source) for move in moves):
                self._catch_up()
            self._depart([m for m in moves if m.target in self.live], back=True)
        if isinstance(step, Exchange):
            self.clocks.arrive()
            self._fill()
        if isinstance(step, Compute):
            self._compute_backward(step)
            return
        for device in self.devices:
            seconds = self._own_s(step, device)[1]
            for cost in self._costs(step, device):
                seconds += cost.backward_input_s + cost.backward_weight_s
            self.clocks.compute(device, seconds)
        if isinstance(step, Spread) and self._is_weight(step.source):
            self.fills.append(step)
        elif isinstance(step, Spread):
            self._summed(step)
            self._fill()

    def _compute_backward(self, step: Compute) -> None:
        """A convolution's gradient by weight waits for messages, or for the next convolution."""
        before, self.fills = self.fills, []
        late = [self._waits(apply) for apply in step.applies]
        for device in self.devices:
            self.clocks.compute(device, self._own_s(step, device)[1])
            for apply, waits in zip(reversed(step.applies), reversed(late), strict=True):
                cost = self._apply(apply, device)
                if waits:
                    self.clocks.catch_up(device)
                    self.clocks.compute(device, cost.backward_input_s)
                    self.clocks.defer(device, cost.backward_weight_s)
                else:
                    self.clocks.compute(device, cost.backward_input_s + cost.backward_weight_s)
        if any(late):
            before, self.fills = [], [*before, *self.fills]
            self._fill()
        self.fills = [*before, *self.fills]

    def _waits(self, apply: Apply) -> bool:
        """Not where the weights are frozen: there is nothing to wait with."""
        late = len(self.devices) > 1 and self.graph.nodes[apply.node].op == LATE
        return late and any(name in self.live for name in apply.inputs[1:])

    def _catch_up(self) -> None:
        for device in self.devices:
            self.clocks.catch_up(device)
        self._fill()

    def _fill(self) -> None:
        """Gradients of weights that were made go into their buckets."""
        fills, self.fills = self.fills, []
        for step in fills:
            self._summed(step)

    def _costs(self, step: Step, device: int) -> Iterator[Seconds]:
        """The operators of a step on one device, without gradients that nobody asks for."""
        if isinstance(step, Compute):
            for apply in step.applies:
                yield self._apply(apply, device)
        elif isinstance(step, Passes):
            yield from self._strips(step, device)
        elif isinstance(step, Combine):
            local = step.parts[device]
            if local is not None:
                cost = self.prices.local(local, step.places[device], device)
                live = any(name in self.live for name in step.inputs)
                yield Seconds(cost.forward_s, cost.backward_input_s if live else 0.0, 0.0)
        elif isinstance(step, Take):
            array = self.program.arrays[step.target]
            if array.boxes is not None:
                size = array.boxes[device].size * BYTES[self.graph.values[array.value].dtype]
                yield Seconds(self.prices.copy_s(size, device), 0.0, 0.0)

    def _apply(self, apply: Apply, device: int) -> Seconds:
        node = self.graph.nodes[apply.node]
        if apply.locals is None:
            cost = self.prices.whole(node, self.graph, device)
        elif (local := apply.locals[device]) is None:
            return Seconds(0.0, 0.0, 0.0)
        else:
            boxes = self.program.arrays[apply.outputs[0]].boxes
            assert boxes is not None
            cost = self.prices.local(local, boxes[device], device)
        return self._wanted(cost, apply.inputs, device)

    def _wanted(self, cost: Seconds, arrays: Sequence[str], device: int) -> Seconds:
        """A first layer has no gradient by input, a frozen one none by weight."""
        by_weight = any(self._is_weight(name) and name in self.live for name in arrays)
        by_input = any(not self._is_weight(name) and name in self.live for name in arrays)
        there_s, back_s = self.prices.own_s(OPERATOR, device)
        return Seconds(
            cost.forward_s + there_s,
            cost.backward_input_s + back_s if by_input else 0.0,
            cost.backward_weight_s + (0.0 if by_input else back_s) if by_weight else 0.0,
        )

    def _is_weight(self, array: str) -> bool:
        found = self.program.arrays.get(array)
        return found is not None and self.graph.values[found.value].kind == "parameter"

    def _strips(self, step: Passes, device: int) -> Iterator[Seconds]:
        """Every strip forward; in the backward pass forward again, all but the last operator.

        Such steps return free pages (``runtime/allocator.py``), so what an operator makes lies on
        new ones each time: forward, and if it is made again once more, with its gradient. So do the
        array that all strips together make, and the gradient of what they read.
        """
        last = len(step.nodes) - 1
        each = [BYTES[self.graph.values[self.graph.nodes[n].output].dtype] for n in step.nodes]
        for strip in step.strips[device]:
            for place, (local, box) in enumerate(zip(strip.locals, strip.boxes, strict=True)):
                cost, arrays = self.prices.local(local, box, device), step.inputs[place]
                weights = [n for n in arrays if n and self._is_weight(n)]
                values = self.graph.nodes[step.nodes[place]].refs
                inner = any(
                    (array or f"{step.target}/{value}") in self.live
                    for array, value in zip(arrays, values, strict=True)
                    if array not in weights
                )
                fresh_s = self.prices.fresh_s(box.size * each[place], device)
                again_s = cost.forward_s + 2 * fresh_s if place != last else 0.0
                by_weight = any(name in self.live for name in weights)
                read = sum(
                    read.box.size
                    for name, read in zip(arrays, local.reads, strict=True)
                    if name in self.live and name not in weights
                )
                flow_s = self.prices.fresh_s(read * each[place], device)
                made_s = cost.forward_s + fresh_s * (2 if place == last else 1)
                yield Seconds(
                    made_s + self.prices.own_s(OPERATOR, device)[0],
                    again_s + flow_s + (cost.backward_input_s if inner else 0.0),
                    cost.backward_weight_s if by_weight else 0.0,
                )

    # ---- messages ------------------------------------------------------------------------

    def _depart(self, moves: Sequence[Move], *, back: bool) -> None:
        messages: list[Message] = []
        kept = [0] * len(self.devices)
        for move in moves:
            target = self.program.arrays[move.target]
            each = BYTES[self.graph.values[target.value].dtype]
            for transfer in move.transfers:
                size = transfer.box.size * each
                if transfer.source == transfer.destination:
                    kept[transfer.source] += size
                elif not back:
                    messages.append((transfer.source, transfer.destination, size))
                elif not target.is_whole:
                    messages.append((transfer.destination, transfer.source, size))
        for device in self.devices:
            self.clocks.compute(device, self.prices.copy_s(kept[device], device))
        self.clocks.depart(messages)

    def _combined_bytes(self, step: Combine) -> int:
        value = self.graph.values[self.graph.nodes[step.node].refs[0]]
        rows = step.reduction.rows
        each = 8 if rows or value.dtype == "float64" or not value.is_floating else 4
        amount = max(1, rows) * prod(step.reduction.shape) * each
        self.summed = [before + amount for before in self.summed]
        return amount

    def _summed(self, step: Spread) -> None:
        """The gradient of what was used by parts: a weight's in a bucket, any other at once."""
        array = self.program.arrays[step.source]
        value = self.graph.values[array.value]
        if value.kind != "parameter":
            self.summed = [before + value.bytes for before in self.summed]
            self._meet(value.bytes)
            return
        whole = Box.whole(value.shape)
        boxes = array.boxes or (whole,) * len(self.devices)
        for circle in dict.fromkeys(sharers(boxes)):
            if len(circle) < 2:
                continue
            size = boxes[circle[0]].size * BYTES[value.dtype]
            self._note_sum(value.name, value.target, size, circle)
            if self.waiting.add(circle, size):
                self._close(circle)

    def _close(self, circle: tuple[int, ...]) -> None:
        self.clocks.background(self.waiting.start(circle), circle)

    def _note_sum(self, name: str, target: str, size: int, circle: Sequence[int]) -> None:
        for device in circle:
            self.summed[device] += size
        self.group_sums[self.weight_group.get(name, 0)] += size
        self.largest_sum = max(self.largest_sum, (size, target))

    def _weight_groups(self) -> dict[str, int]:
        """The first group that uses each weight."""
        found: dict[str, int] = {}
        for step in self.program.steps:
            if isinstance(step, (Compute, Passes)):
                for name in step.reads:
                    found.setdefault(self.program.arrays[name].value, step.group)
        return found

    # ---- the result ----------------------------------------------------------------------

    def prediction(self, step_s: float, feet: tuple[int, ...]) -> Prediction:
        clocks, groups = self.clocks, []
        for number, group in enumerate(self.program.plan.groups):
            spent = clocks.spent(number)
            groups.append(
                GroupCost(
                    group.title or group.last,
                    tuple(one.compute_s for one in spent),
                    tuple(one.exchange_s for one in spent),
                    tuple(one.waiting_s for one in spent),
                    self.group_sums[number],
                )
            )
        all_ = clocks.accounts
        return Prediction(
            step_s,
            tuple(one.compute_s for one in all_),
            tuple(one.exchange_s for one in all_),
            tuple(one.waiting_s + step_s - now for one, now in zip(all_, clocks.now, strict=True)),
            tuple(one.sums_s for one in all_),
            tuple(groups),
            tuple(clocks.sent),
            tuple(self.summed),
            feet,
            bottleneck(all_, groups, names=self.prices.names, largest=self.largest_sum),
            self.delivery_s,
            self.delivered_bytes,
        )

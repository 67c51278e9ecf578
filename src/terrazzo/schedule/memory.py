"""The memory of one training step on one device, walked through before it runs.

The walk does what the runtime does, with sizes in place of tensors: forward through the steps,
then back, holding what is held, and noting where the sum is largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from terrazzo.geometry import Box
from terrazzo.graph.pooling import POOL, TURNING_POOL, by_rows
from terrazzo.graph.rules.rule import Read
from terrazzo.records import Node, Ref, Value
from terrazzo.records.graph import BYTES
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.ledger import Footprint, Ledger
from terrazzo.schedule.lifetimes import Lifetimes
from terrazzo.schedule.program import (
    Combine,
    Compute,
    Exchange,
    Passes,
    Program,
    Spread,
    Strip,
    Take,
)
from terrazzo.schedule.saving import WRITTEN, Late, Operation, Piece, Tensor
from terrazzo.schedule.sums import Circle, Waiting, summed_bytes
from terrazzo.schedule.training import EVERYTHING, Training

LATE = "aten.conv2d.default"
"""The operator whose gradient by weight waits for a message, where there are several devices."""
FEW = 8
"""Channels of which windows take next to nothing."""


def footprint(program: Program, device: int, *, training: Training = EVERYTHING) -> Footprint:
    """The peak of one training step."""
    return _Walk(program, device, training).peak()


def footprints(program: Program, *, training: Training = EVERYTHING) -> tuple[Footprint, ...]:
    """The same on every device."""
    return tuple(footprint(program, device, training=training) for device in range(program.devices))


class _Walk:
    """One step on one device."""

    def __init__(self, program: Program, device: int, training: Training) -> None:
        self.program, self.device = program, device
        graph = program.graph
        weights = [v for v in graph.values.values() if v.kind == "parameter"]
        trained = training.weights(graph)
        self.live = training.live(program)
        self.lives = Lifetimes(program)
        sizes = [self._weight_bytes(v) for v in weights]
        rest = sum(v.bytes for v in graph.values.values() if v.kind in ("buffer", "constant"))
        maps = [self._size(name) for name in program.arrays if self._is_map(name)]
        start = Footprint(
            sum(sizes) + rest,
            tidy=any(group.passes for group in program.plan.groups),
            operators=len(graph.nodes),
            largest_map_bytes=max(maps, default=0),
            states_bytes=training.states
            * sum(self._weight_bytes(v) for v in weights if v.name in trained),
        )
        self.ledger = Ledger(start)
        self.late = Late()
        self.waiting = Waiting(summed_bytes(program, self.live))
        self.held: set[str] = set()
        self.pieces: dict[int, Piece] = {}
        self.results = {program.outputs[r.name] for r in graph.outputs if isinstance(r, Ref)}

    def peak(self) -> Footprint:
        steps = self.program.steps
        for name, boxes in self.program.given.items():
            self.ledger.hold(name, self._bytes(name, boxes[self.device]))
        for index in range(len(steps)):
            self._forward(index)
            for name in self.lives.forward_drops[index]:
                self._let_go(name)
        kept = self.ledger.maps_bytes
        for name in self.results:
            self.ledger.flow(name, self._size(name))
        self.ledger.note("the loss")
        for index in reversed(range(len(steps))):
            for again in self.lives.rebuilt(index, self.live):
                self._forward(again)
            self._backward(index)
            for name in self.lives.backward_drops[index]:
                self._let_go(name)
        self.late.settle(self.ledger)
        self.ledger.note("the last sums of weight gradients", sum(self.waiting.bytes.values()))
        return replace(self.ledger.peak, kept_bytes=kept)

    # ---- sizes ---------------------------------------------------------------------------

    def _weight_bytes(self, weight: Value) -> int:
        """What of a weight lives on this device."""
        if weight.name not in self.program.homes:
            return weight.bytes
        return self._bytes(weight.name, self.program.homes[weight.name][self.device])

    def _bytes(self, value: str, box: Box) -> int:
        return box.size * BYTES[self.program.graph.values[value].dtype]

    def _size(self, name: str) -> int:
        array = self.program.arrays[name]
        if array.boxes is None:
            return self.program.graph.values[array.value].bytes
        return self._bytes(array.value, array.boxes[self.device])

    def _is_map(self, name: str) -> bool:
        """Weights and buffers are counted at the start."""
        return self.program.graph.values[self.program.arrays[name].value].kind in ("node", "input")

    def _tensor(self, name: str) -> Tensor:
        size = self._size(name) if self._is_map(name) else 0
        return Tensor(name, size, size if name in self.live else None)

    # ---- holding -------------------------------------------------------------------------

    def _keep(self, name: str) -> None:
        if name not in self.held and self._is_map(name):
            self.held.add(name)
            self.ledger.hold(name, self._size(name))

    def _let_go(self, name: str) -> None:
        if name in self.held:
            self.held.remove(name)
            self.ledger.drop(name)

    # ---- steps ---------------------------------------------------------------------------

    def _forward(self, index: int) -> None:
        step = self.program.steps[index]
        if isinstance(step, Compute):
            piece = self.pieces[index] = self._piece(index, step)
            piece.forward(self.ledger, keep=any(n in self.live for n in step.writes))
            self.held |= {n for n in piece.exports if self._is_map(n)}
        elif isinstance(step, Passes):
            self._keep(step.target)
            strip = self._widest(step)
            if strip is not None:
                self._strip(step, strip).forward(self.ledger, keep=False)
        elif isinstance(step, Combine):
            self._keep(step.target)
            if self._saves(step):
                self.ledger.hold(step.inputs[0], self._size(step.inputs[0]))
        elif isinstance(step, Exchange):
            for name in step.writes:
                self._keep(name)
            self.ledger.note("an exchange", self._messages(step))

    def _backward(self, index: int) -> None:
        step = self.program.steps[index]
        if isinstance(step, Compute):
            self.pieces[index].backward(self.ledger, self.late)
        elif isinstance(step, Passes):
            strip = self._widest(step)
            if step.target in self.live and strip is not None:
                self.late.settle(self.ledger)
                self._flow(step.reads)
                piece = self._strip(step, strip)
                piece.forward(self.ledger, keep=True)
                piece.given(self.ledger)
                piece.backward(self.ledger)
        elif isinstance(step, Combine):
            self._flow(step.inputs)
            if self._saves(step):
                self.ledger.drop(step.inputs[0])
        elif isinstance(step, Exchange):
            self._flow(step.reads)
            self.ledger.note("an exchange", self._messages(step))
            self.late.settle(self.ledger, self._messages(step))
        elif isinstance(step, (Take, Spread)) and self._is_map(step.source):
            self._flow(step.reads)
        elif isinstance(step, Spread) and step.target in self.live:
            self._fill(step)
        for name in step.writes:
            self.ledger.consume(name)

    def _fill(self, step: Spread) -> None:
        """A weight's gradient goes into a bucket; a full one is copied together to be summed."""
        array = self.program.arrays[step.source]
        if array.boxes is None:
            circle: Circle = tuple(range(self.program.devices))
        else:
            circle = sharers(array.boxes)[self.device]
        if len(circle) < 2:
            return
        if self.waiting.add(circle, self._size(step.source)):
            self.ledger.note("a sum of weight gradients", self.waiting.start(circle))

    def _flow(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.live and self._is_map(name):
                self.ledger.flow(name, self._size(name))

    def _saves(self, step: Combine) -> bool:
        """Statistics of a group without passes hold on to what they were taken of."""
        kept = not self.program.plan.groups[step.group].passes
        return kept and step.target in self.live and self._is_map(step.inputs[0])

    def _messages(self, step: Exchange) -> int:
        """What is sent and received at once, each in a buffer of its own; what stays needs none."""
        total = 0
        for move in step.moves:
            value = self.program.arrays[move.source].value
            for transfer in move.transfers:
                if (transfer.source == self.device) != (transfer.destination == self.device):
                    total += self._bytes(value, transfer.box)
        return total

    # ---- operators -----------------------------------------------------------------------

    def _piece(self, index: int, step: Compute) -> Piece:
        operations = []
        kinds = {_kind(self.program.graph.nodes[apply.node].op) for apply in step.applies}
        for apply in step.applies:
            node = self.program.graph.nodes[apply.node]
            local = apply.locals[self.device] if apply.locals else None
            operations.append(
                Operation(
                    _kind(local.op if local else node.op),
                    tuple(self._tensor(name) for name in apply.inputs),
                    tuple(self._tensor(name) for name in apply.outputs if name),
                    copies=self._padded(node.refs, local.reads) if local else 0,
                    title=node.title,
                    by_rows=_pools_by_rows(node),
                    weights=self._weights(apply.inputs),
                    windows=self._windows_bytes(node, apply.inputs),
                    is_written=kinds <= WRITTEN,
                    waits=self.program.devices > 1 and node.op == LATE,
                )
            )
        return Piece(
            [o for o in operations if o.outputs],
            (n for n in self.lives.exports[index] if self._is_map(n)),
        )

    def _padded(self, values: Sequence[str], reads: Sequence[Read]) -> int:
        """Bytes of what is copied to be padded."""
        return sum(
            prod(extent + sum(pad) for extent, pad in zip(read.box.shape, read.pad, strict=True))
            * BYTES[self.program.graph.values[value].dtype]
            for value, read in zip(values, reads, strict=True)
            if any(amount for pad in read.pad for amount in pad)
        )

    def _widest(self, step: Passes) -> Strip | None:
        strips = step.strips[self.device]
        return max(strips, key=lambda strip: sum(b.size for b in strip.boxes), default=None)

    def _strip(self, step: Passes, strip: Strip) -> Piece:
        """The chain of one strip; its results go by names of their own, and lead nowhere."""
        graph = self.program.graph
        nodes = [graph.nodes[index] for index in step.nodes]
        inside: dict[str, Tensor] = {}
        operations = []
        for node, arrays, local, box in zip(
            nodes, step.inputs, strip.locals, strip.boxes, strict=True
        ):
            inputs = tuple(
                self._read(array, self._bytes(value, read.box)) if array else inside[value]
                for value, array, read in zip(node.refs, arrays, local.reads, strict=True)
            )
            size = self._bytes(node.output, box)
            flows = node.gradient and any(tensor.gradient is not None for tensor in inputs)
            inside[node.output] = Tensor(f"strip/{node.output}", size, size if flows else None)
            operations.append(
                Operation(
                    _kind(local.op),
                    inputs,
                    (inside[node.output],),
                    copies=self._padded(node.refs, local.reads),
                    title=node.title,
                    by_rows=_pools_by_rows(node),
                    weights=self._weights(arrays),
                    windows=self._windows_bytes(node, arrays),
                )
            )
        return Piece(operations, apart="strip/")

    def _windows_bytes(self, node: Node, arrays: Sequence[str]) -> int:
        """Of a convolution that reads more than a pixel of more than a few channels."""
        if node.op != LATE or not arrays[1]:
            return 0
        shape = self.program.graph.shape(node.refs[1])
        return self._size(arrays[1]) if prod(shape[2:]) > 1 and shape[1] > FEW else 0

    def _weights(self, arrays: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """The trained weights among arrays, with the bytes of their gradients here."""
        found = []
        for name in arrays:
            if name and name in self.live:
                value = self.program.graph.values[self.program.arrays[name].value]
                if value.kind == "parameter":
                    found.append((value.name, self._size(name)))
        return tuple(found)

    def _read(self, array: str, part: int) -> Tensor:
        """Part of an array: a view of it, while its gradient is a strip of its own."""
        tensor = self._tensor(array)
        if tensor.gradient is None or not tensor.size:
            return tensor
        return replace(tensor, gradient=part)


def _pools_by_rows(node: Node) -> bool:
    return node.op in (POOL, TURNING_POOL) and by_rows(node.args[1], *node.args[4:6])


def _kind(op: str) -> str:
    return op.split(".")[1]

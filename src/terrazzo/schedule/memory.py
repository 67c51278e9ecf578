"""The memory of one training step on one device, walked through before it runs.

The walk does what the runtime does, with sizes in place of tensors: forward through the steps,
then back, holding what is held, and noting where the sum is largest. An operator under autograd
keeps what its gradient needs (``KEEPS``); a convolution works on copies of its input and result in
an order of its own (oneDNN's), which torch does not count but the device does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from terrazzo.geometry import Box
from terrazzo.graph.rules.rule import Read
from terrazzo.records import Ref
from terrazzo.records.graph import BYTES
from terrazzo.schedule.gradient import differentiable, reached
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

INPUT, RESULT, BOTH, NOTHING = "input", "result", "both", "nothing"

KEEPS = {
    **dict.fromkeys(
        "conv2d conv_transpose2d linear batch_norm group_norm instance_norm layer_norm normalize "
        "rms_norm gelu silu hardswish hardsigmoid mish softplus elu prelu relu6 hardtanh "
        "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d pow log abs clamp square "
        "glu".split(),
        INPUT,
    ),
    **dict.fromkeys(
        "relu leaky_relu sigmoid tanh exp softmax _softmax log_softmax _log_softmax sqrt "
        "rsqrt".split(),
        RESULT,
    ),
    **dict.fromkeys(
        "add sub neg cat stack alias view reshape permute transpose flatten unflatten slice select "
        "expand squeeze unsqueeze chunk split detach contiguous clone pad repeat mean sum "
        "pixel_shuffle pixel_unshuffle upsample_nearest2d upsample_bilinear2d bilinear take copy "
        "constant_pad_nd running moments".split(),
        NOTHING,
    ),
}
"""What autograd keeps of an operator; those not named are taken to keep input and result."""

VIEWS = frozenset(
    "alias view reshape permute transpose flatten unflatten slice select expand squeeze unsqueeze "
    "chunk split detach".split()
)
"""Operators whose result lies in the memory of their input."""

CONVOLUTIONS = frozenset("conv2d conv_transpose2d".split())
WASTE = 0.1
"""Free memory between blocks in use, at most; 1 to 10 % were measured (docs/log.md)."""

INDEX_BYTES = 8
"""Max pools keep the position of every maximum."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most that a training step takes on one device, and what it is made of at that moment.

    Without the process itself, the optimiser's state and what a loss outside of the net needs.
    """

    weights_bytes: int = 0
    weight_gradients_bytes: int = 0
    maps_bytes: int = 0
    map_gradients_bytes: int = 0
    working_bytes: int = 0
    where: str = ""
    kept_bytes: int = 0
    """Maps that wait between the forward and the backward pass."""

    @property
    def used_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.weight_gradients_bytes
            + self.maps_bytes
            + self.map_gradients_bytes
            + self.working_bytes
        )

    @property
    def total_bytes(self) -> int:
        """With what the allocator wastes."""
        return int(self.used_bytes * (1 + WASTE))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A name in the walk, its bytes, and those of its gradient (None: it carries none)."""

    name: str
    size: int
    gradient: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of a piece of autograd, as sizes."""

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    copies: int = 0
    """Bytes of padded copies of its inputs, which it keeps in their place."""
    title: str = ""

    @property
    def working_bytes(self) -> int:
        if self.kind not in CONVOLUTIONS:
            return 0
        return self.inputs[0].size + self.outputs[0].size

    @property
    def is_view(self) -> bool:
        return self.kind in VIEWS

    @property
    def tracked(self) -> bool:
        return any(tensor.gradient is not None for tensor in self.inputs)

    @property
    def keeps(self) -> tuple[Tensor, ...]:
        """What autograd holds on to until the gradient has passed."""
        what = KEEPS.get(self.kind, BOTH)
        kept: list[Tensor] = []
        if what in (INPUT, BOTH):
            own = Tensor(f"{self.outputs[0].name}/padded", self.copies)
            kept += [own] if self.copies else self.inputs
        if what in (RESULT, BOTH):
            kept += self.outputs
        if "max_pool" in self.kind:
            places = self.outputs[0].size // BYTES["float32"] * INDEX_BYTES
            kept.append(Tensor(f"{self.outputs[0].name}/places", places))
        return tuple(kept)


class Ledger:
    """What is held at the moment, and the largest sum so far."""

    def __init__(self, start: Footprint) -> None:
        self.now, self.peak = start, start
        self._sizes: dict[str, int] = {}
        self._holders: Counter[str] = Counter()
        self._flows: dict[str, int] = {}

    def hold(self, name: str, size: int) -> None:
        """One more holder; memory is taken by the first."""
        if not self._holders[name]:
            self._sizes[name] = size
            self._change(maps_bytes=size)
        self._holders[name] += 1

    def drop(self, name: str) -> None:
        self._holders[name] -= 1
        if not self._holders[name]:
            self._change(maps_bytes=-self._sizes[name])

    def flow(self, name: str, size: int) -> None:
        """A gradient arrives; a second one is added to the first."""
        if name not in self._flows:
            self._flows[name] = size
            self._change(map_gradients_bytes=size)

    def consume(self, name: str) -> None:
        self._change(map_gradients_bytes=-self._flows.pop(name, 0))

    def note(self, where: str, working: int = 0) -> None:
        """This is a moment at which so much more is in use."""
        if self.now.used_bytes + working > self.peak.used_bytes:
            self.peak = replace(self.now, working_bytes=working, where=where)

    def _change(self, *, maps_bytes: int = 0, map_gradients_bytes: int = 0) -> None:
        self.now = replace(
            self.now,
            maps_bytes=self.now.maps_bytes + maps_bytes,
            map_gradients_bytes=self.now.map_gradients_bytes + map_gradients_bytes,
        )


class Piece:
    """A run of operators under autograd, on a ledger; ``apart`` keeps its gradients to itself."""

    def __init__(
        self, operations: Sequence[Operation], exports: Iterable[str] = (), *, apart: str = ""
    ) -> None:
        self.operations, self.exports, self.apart = operations, frozenset(exports), apart
        self._made = {tensor.name for operation in operations for tensor in operation.outputs}
        self._root: dict[str, str] = {}
        self._last = {
            tensor.name: position
            for position, operation in enumerate(operations)
            for tensor in (*operation.inputs, *operation.outputs)
        }

    def _storage(self, name: str) -> str:
        return self._root.get(name, name)

    def forward(self, ledger: Ledger, *, keep: bool) -> None:
        """Results are held until their last reader; with ``keep`` also what autograd keeps."""
        for position, operation in enumerate(self.operations):
            for tensor in operation.outputs:
                if operation.is_view:
                    self._root[tensor.name] = self._storage(operation.inputs[0].name)
                ledger.hold(self._storage(tensor.name), tensor.size)
            ledger.note(operation.title, operation.copies + operation.working_bytes)
            if keep and operation.tracked:
                for tensor in operation.keeps:
                    ledger.hold(self._storage(tensor.name), tensor.size)
            for tensor in {*operation.inputs, *operation.outputs}:
                ends = self._last[tensor.name] == position and tensor.name in self._made
                if ends and tensor.name not in self.exports:
                    ledger.drop(self._storage(tensor.name))

    def backward(self, ledger: Ledger) -> None:
        """Gradients run back; what was kept goes as they pass."""
        for operation in reversed(self.operations):
            if not operation.tracked:
                continue
            for tensor in operation.inputs:
                if tensor.gradient:
                    ledger.flow(self.apart + tensor.name, tensor.gradient)
            ledger.note(operation.title, operation.copies + operation.working_bytes)
            for tensor in operation.outputs:
                ledger.consume(self.apart + tensor.name)
            for tensor in operation.keeps:
                ledger.drop(self._storage(tensor.name))
        for name in self._last if self.apart else ():
            ledger.consume(self.apart + name)


def footprint(program: Program, device: int) -> Footprint:
    """The peak of one training step with all weights trained."""
    return _Walk(program, device).peak()


class _Walk:
    def __init__(self, program: Program, device: int) -> None:
        self.program, self.device = program, device
        graph = program.graph
        weights = [v for v in graph.values.values() if v.kind == "parameter"]
        self.carriers = differentiable(
            program, {v.name for v in weights if v.is_floating} & set(program.arrays)
        )
        results = {program.outputs[ref.name] for ref in graph.outputs if isinstance(ref, Ref)}
        self.live = reached(program, self.carriers, results)
        self.lives = Lifetimes(program)
        size = sum(v.bytes for v in weights)
        rest = sum(v.bytes for v in graph.values.values() if v.kind in ("buffer", "constant"))
        self.ledger = Ledger(Footprint(size + rest, size))
        self.held: set[str] = set()
        self.pieces: dict[int, Piece] = {}
        self.results = results

    def peak(self) -> Footprint:
        steps = self.program.steps
        for name, boxes in self.program.given.items():
            self.ledger.hold(name, self._bytes(name, boxes[self.device]))
        for index in range(len(steps)):
            self._forward(index)
            for name in self.lives.forward_drops[index]:
                self._let_go(name)
        kept = self.ledger.now.maps_bytes
        for name in self.results:
            self.ledger.flow(name, self._size(name))
        self.ledger.note("the loss")
        for index in reversed(range(len(steps))):
            for again in self.lives.rebuilt(index, self.live):
                self._forward(again)
            self._backward(index)
            for name in self.lives.backward_drops[index]:
                self._let_go(name)
        return replace(self.ledger.peak, kept_bytes=kept)

    # ---- sizes ---------------------------------------------------------------------------

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
            self.ledger.note("an exchange", self._messages(step, back=False))

    def _backward(self, index: int) -> None:
        step = self.program.steps[index]
        if isinstance(step, Compute):
            self.pieces[index].backward(self.ledger)
        elif isinstance(step, Passes):
            strip = self._widest(step)
            if step.target in self.live and strip is not None:
                self._flow(step.reads)
                piece = self._strip(step, strip)
                piece.forward(self.ledger, keep=True)
                piece.backward(self.ledger)
        elif isinstance(step, Combine):
            self._flow(step.inputs)
            if self._saves(step):
                self.ledger.drop(step.inputs[0])
        elif isinstance(step, Exchange):
            self._flow(step.reads)
            self.ledger.note("an exchange", self._messages(step, back=True))
        elif isinstance(step, (Take, Spread)) and self._is_map(step.source):
            self._flow(step.reads)
        for name in step.writes:
            self.ledger.consume(name)

    def _flow(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.live and self._is_map(name):
                self.ledger.flow(name, self._size(name))

    def _saves(self, step: Combine) -> bool:
        """Statistics of a group without passes hold on to what they were taken of."""
        kept = not self.program.plan.groups[step.group].passes
        return kept and step.target in self.live and self._is_map(step.inputs[0])

    def _messages(self, step: Exchange, *, back: bool) -> int:
        """What is sent and received at once, each in a buffer of its own."""
        total = 0
        for move in step.moves:
            value = self.program.arrays[move.source].value
            for transfer in move.transfers:
                if self.device in (transfer.source, transfer.destination):
                    total += self._bytes(value, transfer.box)
        return total

    # ---- operators -----------------------------------------------------------------------

    def _piece(self, index: int, step: Compute) -> Piece:
        operations = []
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
                )
            )
        return Piece(operations, apart="strip/")

    def _read(self, array: str, part: int) -> Tensor:
        """Part of an array: a view of it, while its gradient is a strip of its own."""
        tensor = self._tensor(array)
        if tensor.gradient is None or not tensor.size:
            return tensor
        return replace(tensor, gradient=part)


def _kind(op: str) -> str:
    return op.split(".")[1]

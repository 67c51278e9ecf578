"""What operators under autograd save, as sizes on a ledger.

An operator keeps what its gradient needs (``KEEPS``); a convolution works on copies of its input
and result in an order of its own (oneDNN's), which torch does not count but the device does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from terrazzo.records.graph import BYTES
from terrazzo.schedule.ledger import Ledger

INPUT, RESULT, BOTH, NOTHING = "input", "result", "both", "nothing"

KEEPS = {
    **dict.fromkeys(
        "conv2d conv_transpose2d linear batch_norm group_norm instance_norm layer_norm normalize "
        "rms_norm gelu silu hardswish hardsigmoid mish softplus elu prelu relu6 hardtanh "
        "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d pow log abs clamp square "
        "glu moments".split(),
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
        "constant_pad_nd running".split(),
        NOTHING,
    ),
}
"""What autograd keeps of an operator; those not named are taken to keep input and result."""

WRITTEN = frozenset(
    "conv2d normalize batch_norm moments relu leaky_relu hardtanh sigmoid silu hardswish "
    "hardsigmoid add max_pool2d".split()
)
"""Operators with gradients of their own (``runtime/derivatives.py``): a step of nothing else does
without autograd, and overwrites what it clamps."""

VIEWS = frozenset(
    "alias view reshape permute transpose flatten unflatten slice select expand squeeze unsqueeze "
    "chunk split detach".split()
)
"""Operators whose result lies in the memory of their input."""

CONVOLUTIONS = frozenset("conv2d conv_transpose2d".split())
INDEX_BYTES = 8
"""Of the place of every maximum, which torch's own max pools keep; pools by rows need a byte."""


TURNED, SUMMED = 2, 4
"""Convolutions with windows hold their weights so many times more: in an order of the kernels' own
or in sums for fewer products, and turned round; and their gradients in parts that are added up."""
STRIPS_BYTES, STRIPS = 5 << 20, 2
"""They copy one of their maps to such an order; or both, twice, in strips of so much together."""


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
    weights: tuple[tuple[str, int], ...] = ()
    """Trained weights that it reads, and the bytes of their gradients."""
    windows: int = 0
    """Of a convolution: the bytes of its weights here, where they are windows of many channels."""
    by_rows: bool = False
    """Of a max pool: whether it keeps nothing but a byte for every maximum."""
    is_written: bool = False
    """Whether its step does without autograd."""
    waits: bool = False
    """Whether these gradients are made later, while messages are on their way."""

    @property
    def working_bytes(self) -> int:
        """What it makes on the way, forward or back to its input."""
        return self._copied_bytes + TURNED * self.windows

    @property
    def summing_bytes(self) -> int:
        """What it makes on the way to the gradient of its weights."""
        return self._copied_bytes + SUMMED * self.windows

    @property
    def _copied_bytes(self) -> int:
        """Of maps: the larger of two, or a few strips of both."""
        if self.kind not in CONVOLUTIONS:
            return 0
        maps = self.inputs[0].size, self.outputs[0].size
        strips = min(STRIPS_BYTES, STRIPS * sum(maps)) if self.windows else 0
        return max(*maps, strips)

    @property
    def is_view(self) -> bool:
        return self.kind in VIEWS

    @property
    def tracked(self) -> bool:
        return any(tensor.gradient is not None for tensor in self.inputs)

    @property
    def keeps(self) -> tuple[Tensor, ...]:
        """What autograd holds on to until the gradient has passed."""
        what = NOTHING if self.by_rows else KEEPS.get(self.kind, BOTH)
        if self.is_written and self.kind == "hardtanh":
            what = RESULT
        kept: list[Tensor] = []
        if what in (INPUT, BOTH):
            own = Tensor(f"{self.outputs[0].name}/padded", self.copies)
            kept += [own] if self.copies else self.inputs
        if what in (RESULT, BOTH):
            kept += self.outputs
        if "max_pool" in self.kind:
            each = 1 if self.by_rows else INDEX_BYTES
            places = self.outputs[0].size // BYTES["float32"] * each
            kept.append(Tensor(f"{self.outputs[0].name}/places", places))
        return tuple(kept)


@dataclass
class Late:
    """Gradients of weights still to be made: what they are made from is held until then."""

    waiting: list[tuple[Operation, str]] = field(default_factory=list)

    def settle(self, ledger: Ledger, working: int = 0) -> None:
        """Makes them, next to ``working`` bytes that something else needs meanwhile."""
        for operation, storage in self.waiting:
            for name, size in operation.weights:
                ledger.earn(name, size)
            ledger.note(operation.title, operation.copies + operation.summing_bytes + working)
            for tensor in operation.outputs:
                ledger.consume(f"late/{tensor.name}")
            ledger.drop(storage)
        self.waiting.clear()


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

    def given(self, ledger: Ledger) -> None:
        """The gradient of what a strip makes lies in pieces, and is copied together."""
        for tensor in self.operations[-1].outputs:
            ledger.flow(self.apart + tensor.name, tensor.size)

    def backward(self, ledger: Ledger, late: Late | None = None) -> None:
        """Gradients run back; what was kept goes as they pass."""
        for operation in reversed(self.operations):
            if not operation.tracked:
                continue
            waits = late is not None and operation.waits and bool(operation.weights)
            if late is not None and waits:
                late.settle(ledger)  # one waits at a time
            for name, size in () if waits else operation.weights:
                ledger.earn(name, size)
            for tensor in operation.inputs:
                if tensor.gradient:
                    ledger.flow(self.apart + tensor.name, tensor.gradient)
            making = operation.working_bytes
            if operation.weights and not waits:
                making = max(making, operation.summing_bytes)
            ledger.note(operation.title, operation.copies + making)
            for tensor in operation.outputs:
                ledger.consume(self.apart + tensor.name)
                if waits:
                    ledger.flow(f"late/{tensor.name}", tensor.size)
            if late is not None and waits:
                ledger.hold(own := self._storage(operation.keeps[0].name), operation.keeps[0].size)
                late.waiting.append((operation, own))
            for tensor in operation.keeps:
                ledger.drop(self._storage(tensor.name))
        for name in self._last if self.apart else ():
            ledger.consume(self.apart + name)

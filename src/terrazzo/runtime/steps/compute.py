"""Compute: operators on what is here, on a tape of their own or as one piece of autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.runtime.convolutions.late import OP, can_wait, convolve_late
from terrazzo.runtime.derivatives import OF_BOTH
from terrazzo.runtime.operators import Operator, local_operator, whole_operator
from terrazzo.runtime.steps.step import Piece, Run
from terrazzo.runtime.steps.tape import Tape, tape
from terrazzo.schedule import Apply, Compute, Program

FORGETFUL = frozenset(
    f"aten.{op}"
    for op in (
        "conv2d.default conv2d.padding conv_transpose2d.input linear.default add.Tensor "
        "batch_norm.default cat.default max_pool2d.default"
    ).split()
) | {f"terrazzo.{op}" for op in "batch_norm group_norm normalize max_pool2d".split()}
"""Operators whose gradient does not need their result."""


class ComputeStep:
    """``exports`` are the arrays that later steps or the caller read."""

    def __init__(
        self, index: int, step: Compute, program: Program, *, device: int, exports: frozenset[str]
    ) -> None:
        self.index, self.step, self.program = index, step, program
        made = {name for apply in step.applies for name in apply.outputs if name}
        self.inputs = tuple(
            dict.fromkeys(
                name for apply in step.applies for name in apply.inputs if name not in made
            )
        )
        self.parameters = frozenset(filter(program.is_parameter, self.inputs))
        self.leaves = tuple(filter(program.is_leaf, self.inputs))
        self.exports = tuple(name for name in made if name in exports)
        self.shown = frozenset(program.outputs.values())
        """What the caller gets, who may change it in place."""
        self._others = self.shown.union(self.leaves)
        """What lies in memory of the caller's, before or after."""
        self.operators = tuple(operator(apply, program, device) for apply in step.applies)
        self.drops = _drops(step, frozenset(self.exports))
        self._overwrite_where_safe()
        self.late = self._late()
        self.only_late = self.late - self._used_otherwise()
        self.fresh = self._fresh()
        self.last_use: frozenset[str] = frozenset()
        self._tapes: dict[frozenset[str], Tape | None] = {}

    def _overwrite_where_safe(self) -> None:
        """Lets activations overwrite what nobody reads again, as ``inplace=True`` would."""
        made_by = {
            name: self.program.graph.nodes[apply.node].op
            for apply in self.step.applies
            for name in apply.outputs
        }
        reads = Counter(name for apply in self.step.applies for name in apply.inputs)
        for apply, call, drops in zip(self.step.applies, self.operators, self.drops, strict=True):
            source = apply.inputs[0] if apply.inputs else ""
            alone = source in drops and reads[source] == 1  # nobody holds a view of it either
            kept = call and call.op in OF_BOTH and not self.shown.isdisjoint(apply.outputs)
            if call and alone and not kept and made_by.get(source) in FORGETFUL:
                call.overwrite()

    def forward(self, run: Run) -> None:
        written = self._tape(run)
        if written is None:
            self._forward_by_autograd(run)
            return
        held, last_use = run.held, self.last_use
        local = {n: held.pop(n) if n in last_use else held[n] for n in self.inputs}
        lasting = written.keeps & self._others
        run.watch({n: local[n] for n in self.inputs if n in lasting})
        kept = written.forward(run, local)
        for name in self.exports:
            held[name] = local[name]
        if not lasting.isdisjoint(self.exports):
            run.watch({n: local[n] for n in self.exports if n in lasting})
        if not run.carriers.isdisjoint(self.exports):
            run.saved[self.index] = kept

    def _tape(self, run: Run) -> Tape | None:
        """The operators with gradients of their own, where all of them have one.

        Not on a GPU, where torch fuses otherwise, nor under autocast, which inserts casts.
        """
        if run.autocast is not None or run.torch_device.type != "cpu":
            return None
        if run.carriers not in self._tapes:
            nodes = self.program.graph.nodes
            parts = zip(self.step.applies, self.operators, self.drops, strict=True)
            self._tapes[run.carriers] = tape(
                [(apply, nodes[apply.node], call, drops) for apply, call, drops in parts],
                run.carriers,
                lambda names: all(name in self.late for name in names),
                self.shown,
            )
        return self._tapes[run.carriers]

    def _forward_by_autograd(self, run: Run) -> None:
        track = any(name in run.carriers for name in self.exports)
        piece = Piece.open(run.torch_device) if track else None
        local: dict[str, Tensor] = {}
        given: dict[str, Tensor] = {}
        with torch.set_grad_enabled(track):
            for name in self.inputs:
                tensor = run.held.pop(name) if name in self.last_use else run.held[name]
                waits = name in self.late and run.autocast is None
                if piece and waits:
                    given[name] = tensor
                if piece and name in run.carriers and not (waits and name in self.only_late):
                    enter = piece.enter_staying if name in self.parameters else piece.enter
                    local[name] = enter(name, tensor)
                else:
                    local[name] = tensor
                del tensor
            for apply, call, drops in zip(
                self.step.applies, self.operators, self.drops, strict=True
            ):
                self._apply(run, local, apply, call=call, late=(piece, given) if piece else None)
                for name in drops:
                    del local[name]
        for name in self.exports:
            tensor = local[name]
            run.held[name] = tensor.detach()
            if piece and name in run.carriers:
                piece.leave(name, tensor)
        if piece:
            run.saved[self.index] = piece

    def _late(self) -> frozenset[str]:
        """Weights of convolutions: their gradients can be made later.

        Not of those that were computed themselves: others wait for their gradients. Nor where all
        compute the whole: nobody waits there, and both gradients at once take less.
        """
        found: set[str] = set()
        for apply, call in zip(self.step.applies, self.operators, strict=True):
            weights = apply.inputs[1:]
            if apply.locals is None or call is None or call.op != OP or not can_wait(call):
                continue
            if all(name in self.parameters for name in weights):
                found |= set(weights)
        return frozenset(found)

    def _fresh(self) -> frozenset[str]:
        """What only a norm reads: it makes the gradient of that in memory of its own."""
        reads = Counter(name for apply in self.step.applies for name in apply.inputs)
        return frozenset(
            apply.inputs[0]
            for apply, call in zip(self.step.applies, self.operators, strict=True)
            if call is not None and call.op == "terrazzo.normalize" and reads[apply.inputs[0]] == 1
        )

    def _used_otherwise(self) -> frozenset[str]:
        """What operators read other than as the weights of a convolution that can wait."""
        found: set[str] = set()
        for apply, call in zip(self.step.applies, self.operators, strict=True):
            late = call is not None and call.op == OP and can_wait(call)
            late = late and set(apply.inputs[1:]) <= self.late
            found |= {*apply.inputs[:1]} if late else {*apply.inputs}
        return frozenset(found)

    def _apply(
        self,
        run: Run,
        local: dict[str, Tensor],
        apply: Apply,
        *,
        call: Operator | None,
        late: tuple[Piece, dict[str, Tensor]] | None,
    ) -> None:
        node = self.program.graph.nodes[apply.node]
        if call is None:
            local[apply.outputs[0]] = run.empty(apply.outputs[0])
            return
        run.links.where = node.title
        names = apply.inputs[1:]
        waits = late and call.op == OP and can_wait(call)
        waits = waits and any(name in run.carriers for name in names)  # a bias alone, maybe
        if late and waits and all(name in late[1] for name in names):
            piece, given = late
            tensors = [local[apply.inputs[0]], *(given[name] for name in names)]
            result = convolve_late(run, piece.token, tensors, call=call, names=names)
        else:
            result = call([local[name] for name in apply.inputs], run.site)
        results = (result,) if isinstance(result, Tensor) else result
        for name, tensor in zip(apply.outputs, results, strict=False):
            if name:
                local[name] = tensor if node.gradient else tensor.detach()

    def backward(self, run: Run) -> None:
        saved: Piece | list[Any] | None = run.saved.pop(self.index, None)
        if saved is None:
            return
        own = run.exclusive.intersection(self.exports)
        grads = {name: run.gradient(name) for name in self.exports if name in run.grads}
        fresh: Set[str] = self.fresh
        found: Mapping[str, Tensor]
        if isinstance(saved, Piece):
            found = saved.backward(grads)
        else:
            written = self._tapes[run.carriers]
            assert written is not None
            found, fresh = written.backward(run, saved, grads, own)
        for name, grad in found.items():
            first = name not in run.grads
            run.add(name, grad)
            if first and name in fresh:
                run.exclusive.add(name)


def operator(apply: Apply, program: Program, device: int) -> Operator | None:
    """A node ready for one device; None where it has nothing to compute."""
    graph = program.graph
    node = graph.nodes[apply.node]
    shape = graph.shape(node.output) if node.output else ()
    if apply.locals is None:
        return whole_operator(node.op, node.args, shape)
    local = apply.locals[device]
    if local is None:
        return None
    boxes = program.arrays[apply.outputs[0]].boxes
    assert boxes is not None
    return local_operator(
        local, held_boxes(apply.inputs, program, device), shape=shape, box=boxes[device]
    )


def held_boxes(names: tuple[str, ...], program: Program, device: int) -> list[Box]:
    """What a device holds of the arrays an operator reads."""
    found = []
    for name in names:
        array = program.arrays[name]
        whole = Box.whole(program.graph.shape(array.value))
        found.append(whole if array.boxes is None else array.boxes[device])
    return found


def _drops(step: Compute, exports: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """After each operator, the tensors that nobody needs any more."""
    last: dict[str, int] = {}
    for position, apply in enumerate(step.applies):
        for name in (*apply.inputs, *(name for name in apply.outputs if name)):
            last[name] = position
    drops: list[list[str]] = [[] for _ in step.applies]
    for name, position in last.items():
        if name not in exports:
            drops[position].append(name)
    return tuple(tuple(names) for names in drops)

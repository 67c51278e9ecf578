"""Passes: a chain of operators in strips, computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.graph.rules import Local
from terrazzo.records import Node
from terrazzo.runtime.convolutions.backward import gradients
from terrazzo.runtime.convolutions.pointwise import gaps_of
from terrazzo.runtime.operators import Operator, local_operator
from terrazzo.runtime.steps.compute import held_boxes
from terrazzo.runtime.steps.step import Piece, Run
from terrazzo.schedule import Passes, Program, Strip

LAST = "last"


class PassesStep:
    def __init__(self, step: Passes, program: Program, *, device: int) -> None:
        self.step, self.program = step, program
        self.strips = [_Strip(strip, step, program, device) for strip in step.strips[device]]
        self.nodes = [program.graph.nodes[index] for index in step.nodes]

    def forward(self, run: Run) -> None:
        """Nothing is saved; one strip's results inside the chain are alive at a time."""
        run.links.where = self.nodes[-1].title
        run.ease((self.step.target,))
        result = run.empty(self.step.target)
        held = run.box(self.step.target)
        with torch.no_grad():
            for strip in self.strips:
                run.ease()
                tensors = {name: self._read(run, strip, name) for name in strip.reads}
                result[strip.box.within(held).slices()] = self._compute(run, strip, tensors)
        run.held[self.step.target] = result

    @staticmethod
    def _read(run: Run, strip: _Strip, name: str) -> Tensor:
        """The part of an array that a strip reads."""
        return run.held[name][strip.reads[name].within(run.box(name)).slices()]

    def _compute(self, run: Run, strip: _Strip, tensors: dict[str, Tensor]) -> Tensor:
        return self._chain(run, strip, tensors, len(self.nodes))[self.nodes[-1].output]

    def _chain(
        self, run: Run, strip: _Strip, tensors: dict[str, Tensor], count: int
    ) -> dict[str, Tensor]:
        """The first operators of the chain; gives what is left to read of their results."""
        inside: dict[str, Tensor] = {}
        for position, node in enumerate(self.nodes[:count]):
            result = strip.operators[position](self._arguments(position, tensors, inside), run.site)
            inside[node.output] = result if node.gradient else result.detach()
            for name in strip.drops[position]:
                del inside[name]
        return inside

    def _arguments(
        self, position: int, tensors: dict[str, Tensor], inside: dict[str, Tensor]
    ) -> list[Tensor]:
        names = zip(self.step.inputs[position], self.nodes[position].refs, strict=True)
        return [tensors[array] if array else inside[value] for array, value in names]

    def backward(self, run: Run) -> None:
        target = self.step.target
        if target not in run.live:
            return
        grad, held = run.gradient(target), run.box(target)
        totals = run.take_exclusive(self.step.reads)  # more is added where it lies
        ours = set(totals)
        run.ease(name for name in self.step.reads if name in run.live and name not in ours)
        for strip in self.strips:
            run.ease()
            part = grad[strip.box.within(held).slices()]
            for name, found in self._strip_backward(run, strip, part).items():
                if self._gather(run, totals, name, strip, found, ours=name in ours):
                    ours.add(name)
        for name, total in totals.items():
            fresh = name not in run.grads
            run.add(name, total)
            if fresh and name in ours:
                run.exclusive.add(name)

    def _strip_backward(self, run: Run, strip: _Strip, grad: Tensor) -> Mapping[str, Tensor]:
        """Computes one strip again, this time with autograd, and differentiates it."""
        piece = Piece.open(run.torch_device)
        with torch.enable_grad(), run.precision():
            tensors = {}
            for name in strip.reads:
                tensor = self._read(run, strip, name)
                tensors[name] = piece.enter(name, tensor) if name in run.live else tensor
            if run.autocast is None and strip.ends_in_convolution:
                return self._convolution_backward(run, strip, piece, tensors, grad)
            piece.leave(LAST, self._compute(run, strip, tensors))
        return piece.backward({LAST: grad})

    def _convolution_backward(
        self, run: Run, strip: _Strip, piece: Piece, tensors: dict[str, Tensor], grad: Tensor
    ) -> Mapping[str, Tensor]:
        """The gradient of a convolution does not need its result, which is most of the work."""
        inside = self._chain(run, strip, tensors, len(self.nodes) - 1)
        call, arrays = strip.operators[-1], self.step.inputs[-1]
        x, weight, *bias = call.ready(self._arguments(-1, tensors, inside))
        piece.leave(LAST, x)
        wanted = [x.requires_grad, arrays[1] in run.live, bool(bias) and arrays[2] in run.live]
        stride, padding, dilation, groups = call.args[3:7]
        arguments = (
            grad.contiguous(), x.detach(), weight.detach(), [weight.shape[0]] if bias else None,
            stride, padding, gaps_of(x, weight, dilation), False, [0, 0], groups,
        )  # fmt: skip
        gx, gw, gb = gradients(arguments, wanted)
        del inside, x, weight, arguments, grad  # gone before the chain needs memory for its own
        found = dict(piece.backward({LAST: gx})) if gx is not None else {}
        for name, part, asked in zip(arrays[1:], (gw, gb), wanted[1:], strict=False):
            if asked and part is not None:
                found[name] = found[name] + part if name in found else part
        return found

    def _gather(
        self,
        run: Run,
        totals: dict[str, Tensor],
        name: str,
        strip: _Strip,
        part: Tensor,
        *,
        ours: bool,
    ) -> bool:
        """Adds the gradient of one strip's read to that of the array; True if the sum is ours."""
        if part.shape == run.box(name).shape and name not in totals:
            totals[name] = part
            return False
        if name not in totals:
            totals[name] = run.zeros(name)
        elif totals[name].shape == part.shape:
            totals[name] = totals[name].add_(part) if ours else totals[name] + part
            return True
        totals[name][strip.reads[name].within(run.box(name)).slices()] += part
        return True


def is_plain_convolution(call: Operator, local: Local, box: Box) -> bool:
    """Whether an operator is a convolution whose result is just the box, nothing cropped off."""
    if call.op != "aten.conv2d.default":
        return False
    _, _, _, stride, padding, dilation, _ = call.args
    read, kernel = local.reads[0], local.reads[1].box.shape[2:]
    if call.crop and call.crop[-3] != slice(0, local.reads[1].box.shape[0]):
        return False  # of channels: a cut goes through what belongs together
    for dim in (0, 1):
        extent = read.box.shape[dim - 2] + sum(read.pad[dim - 2]) + 2 * padding[dim]
        made = (extent - dilation[dim] * (kernel[dim] - 1) - 1) // stride[dim] + 1
        if made != box.shape[dim - 2]:
            return False
    return True


class _Strip:
    """One strip made ready: what it reads of each array, and its operators."""

    def __init__(self, strip: Strip, step: Passes, program: Program, device: int) -> None:
        graph = program.graph
        self.box = strip.box
        nodes = [graph.nodes[index] for index in step.nodes]
        self.reads: dict[str, Box] = {}
        for arrays, local in zip(step.inputs, strip.locals, strict=True):
            for array, read in zip(arrays, local.reads, strict=True):
                if array:
                    known = self.reads.get(array, Box.empty(read.box.rank))
                    self.reads[array] = known.hull(read.box)
        boxes = {node.output: box for node, box in zip(nodes, strip.boxes, strict=True)}
        for array, read_box in self.reads.items():
            (have,) = held_boxes((array,), program, device)
            assert have.contains(read_box), f"{array} holds {have}, a strip reads {read_box}"
        self.operators: list[Operator] = []
        for node, arrays, local in zip(nodes, step.inputs, strip.locals, strict=True):
            have_boxes = [
                self.reads[array] if array else boxes[name]
                for array, name in zip(arrays, node.refs, strict=True)
            ]
            shape = graph.shape(node.output)
            self.operators.append(
                local_operator(local, have_boxes, shape=shape, box=boxes[node.output])
            )
        self.drops = self._drops(step, nodes)
        self.ends_in_convolution = is_plain_convolution(
            self.operators[-1], strip.locals[-1], strip.box
        )

    @staticmethod
    def _drops(step: Passes, nodes: list[Node]) -> list[list[str]]:
        """After each node, the results inside the chain that nobody needs any more."""
        last: dict[str, int] = {}
        for position, (node, arrays) in enumerate(zip(nodes, step.inputs, strict=True)):
            for array, name in zip(arrays, node.refs, strict=True):
                if not array:
                    last[name] = position
        drops: list[list[str]] = [[] for _ in nodes]
        for name, position in last.items():
            drops[position].append(name)
        return drops

"""Norm: statistics over what all devices own, then a norm of what is here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.graph.rules.norms import statistics
from terrazzo.records import Ref
from terrazzo.runtime.norms import Moments, as_rows, measure, normalize, running
from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Norm, Program

BATCH, GROUP = "terrazzo.batch_norm", "terrazzo.group_norm"


class NormStep:
    """Arguments come in the order of the canonical operators (graph/canonical.py)."""

    def __init__(self, index: int, step: Norm, program: Program, *, device: int) -> None:
        self.index, self.step = index, step
        self.node = program.graph.nodes[step.node]
        self.pairs, self.elements = statistics(self.node, program.graph)
        array = program.arrays[step.inputs[0]]
        target = program.arrays[step.outputs[0]]
        assert array.boxes is not None and target.boxes is not None
        have, owned, want = array.boxes[device], step.owned[device], target.boxes[device]
        self.own = None if owned.is_empty else owned.within(have).slices()
        self.use = None if want.is_empty else want.within(have).slices()
        self.same = have == want
        self.eps = float(self.node.args[-1])  # type: ignore[arg-type]
        self.groups = int(self.node.args[1]) if self.node.op == GROUP else 0  # type: ignore[arg-type]

    def _arguments(self, run: Run) -> list[Any]:
        arrays = iter(self.step.inputs)
        return [
            run.held[next(arrays)] if isinstance(argument, Ref) else argument
            for argument in self.node.args
        ]

    def _names(self) -> list[str]:
        """The array of x, weight and bias, empty where there is none."""
        arrays = iter(self.step.inputs)
        names = [next(arrays) if isinstance(a, Ref) else "" for a in self.node.args]
        return [names[0], names[2], names[3]] if self.groups else names[:3]

    def forward(self, run: Run) -> None:
        run.links.where = self.node.title
        arguments = self._arguments(run)
        x = arguments[0]
        weight, bias = arguments[2:4] if self.groups else arguments[1:3]
        if self.own:
            rows = as_rows(x[self.own], self.node.op, self.groups)
        else:
            rows = x.new_empty(1, self.pairs, 0, 0)
        moments = measure(rows, run.links, self.step.counts)
        if self.use is None:
            run.held[self.step.outputs[0]] = run.empty(self.step.outputs[0])
        else:
            run.held[self.step.outputs[0]] = self._normalized(
                x if self.same else x[self.use], moments, weight, bias
            ).to(run.dtype(self.step.outputs[0]))
        if not self.groups and len(self.step.outputs) > 1 and self.step.outputs[1]:
            samples = run.program.graph.shape(self.node.refs[0])[0]
            old = (arguments[3], arguments[4])
            new = running(old, moments, arguments[5], samples)
            for name, tensor in zip(self.step.outputs[1:], new, strict=True):
                if name:
                    run.held[name] = tensor
        if self.step.outputs[0] in run.carriers:
            run.saved[self.index] = (x, moments, weight)

    def _normalized(
        self, x: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if self.node.op == BATCH:
            return normalize(x, moments, (weight, bias), self.eps)
        rows = as_rows(x, self.node.op, self.groups)
        result = normalize(rows, moments, (None, None), self.eps).reshape(x.shape)
        if weight is not None:
            result = result * weight.view(1, -1, 1, 1)
        return result if bias is None else result + bias.view(1, -1, 1, 1)

    def backward(self, run: Run) -> None:
        saved = run.saved.pop(self.index, None)
        if saved is None or self.step.outputs[0] not in run.live:
            return
        x, moments, weight = saved
        grad = run.gradient(self.step.outputs[0])
        x_name, weight_name, bias_name = self._names()
        exact = moments.mean.dtype
        sums = torch.zeros(2, self.pairs, dtype=exact, device=run.torch_device)
        grad_x: Tensor | None = None
        if self.use is not None:
            used = x if self.same else x[self.use]
            grad_x, own_weight, own_bias, sums = self._local_backward(grad, used, moments, weight)
            if weight_name in run.live and own_weight is not None:
                run.add(weight_name, own_weight.to(run.dtype(weight_name)))
            if bias_name in run.live:
                run.add(bias_name, own_bias.to(run.dtype(bias_name)))
        if x_name not in run.live:
            return
        sums = run.links.sum(sums)
        result = run.zeros(x_name) if not self.same or grad_x is None else grad_x
        if grad_x is not None and not self.same:
            result[self.use] = grad_x
        if self.own is not None:
            self._through_statistics(result[self.own], x[self.own], moments, sums)
        run.add(x_name, result)

    def _local_backward(
        self, grad: Tensor, x: Tensor, moments: Moments, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """With fixed statistics: gradients of x, weight, bias, and the sums statistics need.

        The sums are of the gradient of the normalised input, and of its product with it.
        """
        if self.node.op == BATCH:
            gx, gw, gb = self._fixed(grad, x, moments, weight)
            scale = 1.0 if weight is None else weight.to(moments.mean.dtype)
            return gx, gw, gb, torch.stack([gb * scale, gw * scale])
        rows = as_rows(x, self.node.op, self.groups)
        normal = normalize(rows, moments, (None, None), self.eps).reshape(x.shape)
        own_weight = None if weight is None else (grad * normal).sum((0, 2, 3))
        own_bias = grad.sum((0, 2, 3))
        inner = grad if weight is None else grad * weight.view(1, -1, 1, 1)
        inner = inner.to(x.dtype)
        gx, product, plain = self._fixed(
            as_rows(inner, self.node.op, self.groups), rows, moments, None
        )
        return gx.reshape(x.shape), own_weight, own_bias, torch.stack([plain, product])

    def _fixed(
        self, grad: Tensor, rows: Tensor, moments: Moments, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gx, gw, gb = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(), rows, weight, moments.mean, moments.variance, None, None,
            False, self.eps, [True, True, True],
        )  # fmt: skip
        return gx, gw.to(moments.mean.dtype), gb.to(moments.mean.dtype)

    def _through_statistics(self, grad: Tensor, x: Tensor, moments: Moments, sums: Tensor) -> None:
        """Takes the gradient that flows through mean and variance off the owned elements."""
        inverse = torch.rsqrt(moments.variance + self.eps)
        slope = inverse * inverse * sums[1] / self.elements
        level = inverse * sums[0] / self.elements - slope * moments.mean
        rows = as_rows(x, self.node.op, self.groups)
        shape = (1, -1, 1, 1)
        flow = rows * slope.to(x.dtype).view(shape) + level.to(x.dtype).view(shape)
        grad.sub_(flow.reshape(grad.shape))

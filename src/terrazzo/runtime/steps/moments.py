"""Moments: mean and variance over what all devices own."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.runtime.norms import as_column, as_rows, merge, part_moments, precise, spread
from terrazzo.runtime.steps.compute import held_boxes
from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Combine, Program

CACHED = 1 << 17
"""Elements of a map that are changed at a time."""


def _counts(step: Combine, pairs: int) -> Tensor:
    counts = torch.zeros(len(step.parts), pairs, dtype=torch.float64)
    for device, (local, place) in enumerate(zip(step.parts, step.places, strict=True)):
        if local is not None:
            low, high = place.spans[1]
            counts[device, low:high] = local.reads[0].box.size // (high - low)
    return counts


class MomentsStep:
    """``again``: its input is not kept but computed again before the backward pass."""

    def __init__(
        self, index: int, step: Combine, program: Program, *, device: int, again: bool
    ) -> None:
        self.index, self.step, self.again = index, step, again
        self.node = program.graph.nodes[step.node]
        _, self.kind, self.groups = self.node.args
        pairs = step.reduction.shape[1]
        self.counts = _counts(step, pairs)
        """By device and pair of statistics: over how many elements."""
        self.all = self.counts.sum(0)
        self._shares: Tensor | None = None
        self.place = step.places[device].slices()[1]
        local = step.parts[device]
        (held,) = held_boxes(step.inputs, program, device)
        self.owns_none = local is None
        self.own = local.reads[0].box.within(held).slices() if local else ()
        """Where what is counted lies in what is held; nothing where that is all of it."""
        if local is not None and local.reads[0].box == held:
            self.own = ()
        self.fills = self.place == slice(0, pairs)

    def forward(self, run: Run) -> None:
        run.links.where = self.node.title
        x = run.held[self.step.inputs[0]]
        if self.owns_none:
            dtype = precise(run.dtype(self.step.inputs[0]))
            part = torch.zeros(self.step.reduction.shape, dtype=dtype, device=run.torch_device)
        else:
            rows = as_rows(self._counted(x), str(self.kind), int(self.groups))  # type: ignore[arg-type]
            part = part_moments(rows)
            if part.shape != self.step.reduction.shape:
                full = part.new_zeros(self.step.reduction.shape)
                full[:, self.place] = part
                part = full
        if run.links.devices == 1 and part.is_cuda:  # nothing to merge: the host need not wait
            moments = torch.stack([part[0], part[1] * self._share(part)[0]])
        else:
            moments = merge(part, run.links, self.counts, self.all)
        run.held[self.step.target] = moments
        if self.step.target in run.carriers:
            run.saved[self.index] = (None if self.again else x, moments)

    def backward(self, run: Run) -> None:
        """Gradients of mean and variance flow to the elements that were counted."""
        saved = run.saved.pop(self.index, None)
        if saved is None or self.step.target not in run.live:
            return
        x, moments = saved
        x = run.held[self.step.inputs[0]] if x is None else x
        grad = run.gradient(self.step.target)
        if self.owns_none:
            return
        if not self.fills:
            grad, moments = grad[:, self.place], moments[:, self.place]
        level, slope = spread(grad, moments, self._share(grad))
        self._add(run, x, level, slope)

    def _counted(self, x: Tensor) -> Tensor:
        """Of what is held, what counts; a slice of everything is not free."""
        return x[self.own] if self.own else x

    def _share(self, like: Tensor) -> Tensor:
        """1/n and 2/n, over how many elements in all; kept, because a copy to a GPU waits for all
        its work."""
        kept = self._shares
        if kept is None or kept.dtype != like.dtype or kept.device != like.device:
            count = self.all[self.place]
            kept = self._shares = torch.stack([1 / count, 2 / count]).to(like)
        return kept

    def _add(self, run: Run, x: Tensor, level: Tensor, slope: Tensor) -> None:
        """Adds level + slope * x to the gradient of what was counted, in place if it is ours."""
        name = self.step.inputs[0]
        first = name not in run.grads and not self.own
        if first:
            run.grads[name] = run.empty(name)
        elif name not in run.exclusive:
            before = run.grads.get(name)
            run.grads[name] = run.zeros(name) if before is None else before.clone()
        run.exclusive.add(name)
        kind, groups = str(self.kind), int(self.groups)  # type: ignore[arg-type]
        part = self._counted(run.grads[name])
        rows = as_rows(self._counted(x), kind, groups)
        flow = as_rows(part, kind, groups)  # a view, unless rows had to be copied together
        level, slope = as_column(level, rows), as_column(slope, rows)
        if first:
            torch.addcmul(level, rows, slope, out=flow)
        else:
            _add_line(flow, rows, level, slope)
        if flow.data_ptr() != part.data_ptr():
            part.copy_(flow.reshape(part.shape))


def _add_line(flow: Tensor, rows: Tensor, level: Tensor, slope: Tensor) -> None:
    """Adds level + slope * rows, twice over what is still in a cache."""
    step = max(1, CACHED // max(1, rows.numel() // rows.shape[1]))
    if step >= rows.shape[1]:
        flow.addcmul_(rows, slope).add_(level)
        return
    for low in range(0, rows.shape[1], step):
        span = (slice(None), slice(low, low + step))
        flow[span].addcmul_(rows[span], slope[span]).add_(level[span])

"""Combine: one part per device, made into a result that all devices hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.runtime.kernels import kernel
from terrazzo.runtime.operators import local_operator
from terrazzo.runtime.steps.compute import held_boxes
from terrazzo.runtime.steps.step import Piece, Run
from terrazzo.schedule import Combine, Program

PART = "part"


class CombineStep:
    def __init__(self, index: int, step: Combine, program: Program, *, device: int) -> None:
        self.index, self.step = index, step
        self.node = program.graph.nodes[step.node]
        local, self.place = step.parts[device], step.places[device]
        held = held_boxes(step.inputs, program, device)
        self.operator = (
            None
            if local is None
            else local_operator(local, held, shape=step.reduction.shape, box=self.place)
        )

    def forward(self, run: Run) -> None:
        run.links.where = self.node.title
        track = self.step.target in run.carriers
        piece = Piece.open(run.torch_device) if track else None
        with torch.set_grad_enabled(track):
            part = self._part(run, piece)
        if self.step.reduction.combine == "sum":
            total, weight = run.links.sum(part.detach().clone()), None
        else:
            total, weight = self._extreme(run, part.detach())
        finish = Piece.open(run.torch_device) if track else None
        with torch.set_grad_enabled(track):
            entered = finish.enter(PART, total) if finish else total
            if self.step.reduction.finish:
                entered = kernel(self.step.reduction.finish)(
                    entered, *self.step.reduction.finish_args
                )
            result = entered.to(run.dtype(self.step.target))
        run.held[self.step.target] = result.detach()
        if piece and finish:
            piece.leave(PART, part)
            finish.leave(self.step.target, result)
            run.saved[self.index] = (piece, finish, weight)

    def _part(self, run: Run, piece: Piece | None) -> Tensor:
        """This device's part, laid into the shape of everybody's."""
        reduction = self.step.reduction
        rows = (reduction.rows,) if reduction.rows else ()
        exact = self._precision(run)
        start = float("-inf") if reduction.rows else 0
        full = torch.full((*rows, *reduction.shape), start, dtype=exact, device=run.torch_device)
        if self.operator is None:
            return full
        tensors = [
            piece.enter(f"{position}", run.held[name])
            if piece and name in run.carriers
            else run.held[name]
            for position, name in enumerate(self.step.inputs)
        ]
        part = self.operator(tensors, run.site).to(exact)
        if part.shape == full.shape:
            return part  # type: ignore[no-any-return]
        slices = (*(slice(None) for _ in rows), *self.place.slices())
        full[slices] = part
        return full

    def _precision(self, run: Run) -> torch.dtype:
        if self.step.reduction.rows:
            return torch.float64  # positions are counted exactly
        dtype = run.dtype(self.step.target)
        if not dtype.is_floating_point:
            return torch.int64
        return torch.float64 if dtype == torch.float64 else torch.float32

    def _extreme(self, run: Run, part: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of all, and the share of its gradient that is this device's."""
        everybody = run.links.gather(part)
        values, second = everybody[:, 0], everybody[:, 1]
        best = values.amax(0)
        winners = values == best
        if self.step.reduction.combine == "max":
            ties = torch.where(winners, second, torch.zeros_like(second))
            return best, ties[run.device] / ties.sum(0)
        first = torch.where(winners, second, torch.full_like(second, float("inf"))).amin(0)
        mine = winners[run.device] & (second[run.device] == first)
        return best, mine.to(best.dtype)

    def backward(self, run: Run) -> None:
        saved: Any = run.saved.pop(self.index, None)
        if saved is None or self.step.target not in run.live:
            return
        piece, finish, weight = saved
        grads = {self.step.target: run.gradient(self.step.target)}
        total = finish.backward(grads)[PART]
        if weight is not None:
            total = torch.stack([total * weight, torch.zeros_like(total)])
        for position, grad in piece.backward({PART: total}).items():
            run.add(self.step.inputs[int(position)], grad)

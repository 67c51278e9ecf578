"""PyTorch's pipeline: the model cut into stages of like work, microbatches passed along them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.flop_counter import FlopCounterMode

from terrazzo import zoo
from terrazzo.bench.cases import Case
from terrazzo.bench.peers.peer import Trainer, Work
from terrazzo.bench.task import loss_of, optimizer_of

TOUCH_FLOPS = 8
"""What an element of a map costs beside its convolutions: norm, activation, pooling."""


class Pipeline:
    name = "pipeline"
    claims_exact = False  # with more than one microbatch, BatchNorm sees one at a time
    alone = False

    def can(self, case: Case, devices: int) -> str | None:
        layers = chain(zoo.build(case.model))
        if not layers:
            return "the model is no chain of layers: it would have to be cut by hand"
        if len(layers) < devices:
            return f"{len(layers)} layers for {devices} stages"
        return None

    def build(self, work: Work) -> Trainer:
        return PipelineTrainer(work)


class PipelineTrainer(Trainer):
    choice_word = "microbatches"

    def __init__(self, work: Work) -> None:
        task, self.work = work.task(), work
        self.images = task.images
        layers = chain(task.model)
        ends = balanced(costs(layers, task.images[:1]), work.devices)
        own = layers[ends[work.device - 1] if work.device else 0 : ends[work.device]]
        self.names = {id(p): name for name, p in task.model.named_parameters()}
        self.stage_layers = nn.Sequential(*own)
        parameters = list(self.stage_layers.parameters())
        self.optimizer = optimizer_of(parameters) if parameters else None
        batch = work.case.batch
        self.choices = [n for n in range(batch, 0, -1) if batch % n == 0]
        self.use(self.choices[0])

    def use(self, choice: int) -> None:
        device, devices = self.work.device, self.work.devices
        stage = PipelineStage(self.stage_layers, device, devices, torch.device("cpu"))
        kind = Schedule1F1B if choice >= devices else ScheduleGPipe
        self.schedule = kind(stage, choice, loss_fn=lambda output, _: loss_of(output))

    def step(self) -> None:
        if self.work.device == 0:
            self.schedule.step(self.images)
        elif self.work.device == self.work.devices - 1:
            self.schedule.step(target=self.images[:, :1, :1, :1])  # cut like a batch, and not used
        else:
            self.schedule.step()

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        own = self.stage_layers.parameters()
        return {self.names[id(p)]: p.grad for p in own if p.grad is not None}


def chain(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that is a sequence, of sequences if need be; none if it is not."""
    if not isinstance(model, nn.Sequential):
        return []
    return [layer for child in model for layer in (chain(child) or [child])]


def costs(layers: Sequence[nn.Module], image: Tensor) -> list[float]:
    """The work of each layer on one image, counted without computing anything."""
    x, found = image.to("meta"), []
    for layer in layers:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            x = copy.deepcopy(layer).to("meta")(x)
        found.append(float(counter.get_total_flops() + TOUCH_FLOPS * x.numel()))
    return found


def balanced(work: Sequence[float], stages: int) -> list[int]:
    """Where each stage ends, so that the busiest has as little to do as can be."""
    # best[s][n]: the least load of the busiest of s stages over the first n layers, and the cut
    count = len(work)
    total = [sum(work[:n]) for n in range(count + 1)]
    best = [[(total[n], 0) for n in range(count + 1)]]
    for stage in range(1, stages):
        row = [(float("inf"), 0)] * (count + 1)
        for n in range(stage + 1, count + 1):
            row[n] = min((max(best[-1][k][0], total[n] - total[k]), k) for k in range(stage, n))
        best.append(row)
    ends = [count]
    for stage in range(stages - 1, 0, -1):
        ends.insert(0, best[stage][ends[0]][1])
    return ends

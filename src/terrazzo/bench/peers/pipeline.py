"""PyTorch's pipeline: the model cut into stages of like work, microbatches passed along them.

The cuts are torch's own: it traces the model, and hands what later stages need past those between.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.utils.flop_counter import FlopCounterMode

from terrazzo import zoo
from terrazzo.bench.cases import Case
from terrazzo.bench.peers.peer import Trainer, Work
from terrazzo.bench.task import Task, loss_of, optimizer_of

TOUCH_FLOPS = 8
"""What an element of a map costs beside its convolutions: norm, activation, pooling."""


class Pipeline:
    name = "pipeline"
    claims_exact = False  # with more than one microbatch, BatchNorm sees one at a time
    alone = False
    compiles = True

    def can(self, case: Case, devices: int) -> str | None:
        layers = len(costs(zoo.build(case.model), (1, 3, case.side, case.side)))
        return f"{layers} layers for {devices} stages" if layers < devices else None

    def build(self, work: Work) -> Trainer:
        return PipelineTrainer(work)


class PipelineTrainer(Trainer):
    def choice_text(self, choice: int) -> str:
        return f"{choice} microbatch{'es' * (choice > 1)}"

    def __init__(self, work: Work) -> None:
        self.work = work
        batch = work.case.batch
        self.choices = [n for n in range(batch, 0, -1) if batch % n == 0]
        self.use(self.choices[0])

    def use(self, choice: int) -> None:
        device, devices = self.work.device, self.work.devices
        self.module: nn.Module | None = None  # memory is free before it is taken again
        self.schedule: Schedule1F1B | ScheduleGPipe | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        task = self.work.task()
        pipe = _cut(task, devices, microbatch=len(task.images) // choice)
        self.module = pipe.get_stage_module(device)
        parameters = list(self.module.parameters())
        self.optimizer = optimizer_of(parameters) if parameters else None
        stage = pipe.build_stage(device, torch.device("cpu"))
        kind = Schedule1F1B if choice >= devices else ScheduleGPipe
        self.schedule = kind(stage, choice, loss_fn=lambda output, _: loss_of(output))
        # The last one's target is cut like a batch, and not used.
        self.given: tuple[Tensor, ...] = (task.images,) if device == 0 else ()
        self.target = task.images[:, :1, 0, 0].clone() if device == devices - 1 else None

    def step(self) -> None:
        assert self.schedule is not None
        if self.target is None:
            self.schedule.step(*self.given)
        else:
            self.schedule.step(*self.given, target=self.target)

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        assert self.module is not None
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}


def _cut(task: Task, stages: int, *, microbatch: int) -> Any:
    """The model in stages of like work, as torch traces it on a microbatch."""
    work = costs(task.model, tuple(task.images[:1].shape))
    names = list(work)
    begins = [names[end] for end in balanced(list(work.values()), stages)[:-1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        return pipeline(
            task.model,
            (task.images[:microbatch],),
            split_spec=dict.fromkeys(begins, SplitPoint.BEGINNING),
        )


def costs(model: nn.Module, shape: Sequence[int]) -> dict[str, float]:
    """The work of each layer that can begin a stage, on one image, in the order they are called.

    Nothing is computed. A layer that can't counts with the one before it.
    """
    model = copy.deepcopy(model).to("meta")
    found: dict[str, float] = {}
    counter, counted = FlopCounterMode(display=False), 0

    def counting(name: str) -> Callable[..., None]:
        def count(module: nn.Module, given: Any, output: Any) -> None:
            nonlocal counted
            more, counted = counter.get_total_flops() - counted, counter.get_total_flops()
            # What works in place would change what its stage received, which torch refuses.
            begins = not getattr(module, "inplace", False) or not found
            owner = name if begins else next(reversed(found))
            found[owner] = found.get(owner, 0.0) + more + TOUCH_FLOPS * output.numel()

        return count

    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(counting(name))
    with counter, torch.no_grad():
        model(torch.empty(tuple(shape), device="meta"))
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

"""One device, the whole batch at once: plain PyTorch, which every other is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.bench.cases import Case
from terrazzo.bench.peers.peer import Trainer, Work
from terrazzo.bench.task import gradients_of, loss_of, optimizer_of


class Alone:
    name = "alone"
    claims_exact = True
    alone = True
    compiles = False

    def can(self, case: Case, devices: int) -> str | None:
        return None

    def build(self, work: Work) -> Trainer:
        return AloneTrainer(work, pieces=1)


class AloneTrainer(Trainer):
    """Trains on a batch in equal pieces, one after the other."""

    def __init__(self, work: Work, *, pieces: int) -> None:
        task = work.task()
        self.model = task.model
        self.pieces = task.images.chunk(pieces)
        self.parts = len(self.pieces)
        self.optimizer = optimizer_of(self.model.parameters())

    def part(self, number: int) -> None:
        torch.autograd.backward(loss_of(self.model(self.pieces[number])) / self.parts)

    def step(self) -> None:
        for number in range(self.parts):
            self.part(number)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.model)

"""PyTorch's DistributedDataParallel: whole images to each device, gradients summed in buckets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from terrazzo.bench.cases import Case, shares
from terrazzo.bench.peers.peer import Trainer, Work
from terrazzo.bench.task import gradients_of, loss_of, optimizer_of

BUCKETS_MB = (25, 4, 1)


def too_few_images(case: Case, devices: int) -> str | None:
    """The limit of every way that spreads whole images."""
    if case.batch >= devices:
        return None
    return f"{case.batch} of at least {devices} images: it gives each device whole images"


class Ddp:
    name = "ddp"
    claims_exact = False  # each replica's BatchNorm sees its own images only
    alone = False
    compiles = True

    def can(self, case: Case, devices: int) -> str | None:
        return too_few_images(case, devices)

    def build(self, work: Work) -> Trainer:
        return DdpTrainer(work)


class DdpTrainer(Trainer):
    choices = BUCKETS_MB

    def choice_text(self, choice: int) -> str:
        return f"{choice} MB a bucket"

    def __init__(self, work: Work) -> None:
        self.work = work
        self.net: nn.Module | None = None
        self.use(self.choices[0])

    def use(self, choice: int) -> None:
        self.net = None  # the old one's hooks must be gone before memory is taken again
        task, own = self.work.task(), shares(self.work.case.batch, self.work.devices)
        part = own[self.work.device]
        self.images = task.part(part)
        # Gradients are averaged over devices; with uneven parts images must still count alike.
        self.weight = len(part) * self.work.devices / self.work.case.batch
        self.model = task.model
        # All made the same model from one seed: there is nothing to bring into line.
        self.net = DistributedDataParallel(task.model, bucket_cap_mb=choice, init_sync=False)
        self.optimizer = optimizer_of(task.model.parameters())

    def step(self) -> None:
        assert self.net is not None
        torch.autograd.backward(self.weight * loss_of(self.net(self.images)))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # they are views of the buckets

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.model) if self.work.device == 0 else {}

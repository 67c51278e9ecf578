"""PyTorch's FSDP2: whole images to each device, and each keeps a part of the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from terrazzo.bench.cases import Case, shares
from terrazzo.bench.peers.ddp import too_few_images
from terrazzo.bench.peers.peer import Trainer, Work
from terrazzo.bench.task import gradients_of, loss_of, optimizer_of


class Fsdp2:
    name = "fsdp2"
    claims_exact = False  # BatchNorm sees its own images only, as in DDP
    alone = False
    compiles = True

    def can(self, case: Case, devices: int) -> str | None:
        return too_few_images(case, devices)

    def build(self, work: Work) -> Trainer:
        return Fsdp2Trainer(work)


class Fsdp2Trainer(Trainer):
    def __init__(self, work: Work) -> None:
        task = work.task()
        self.work = work
        part = shares(work.case.batch, work.devices)[work.device]
        self.images = task.part(part)
        self.weight = len(part) * work.devices / work.case.batch
        self.model = task.model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for child in self.model.children():  # gathered one after the other, not all at once
            if not isinstance(child, nn.ModuleList) and any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer_of(self.model.parameters())

    def step(self) -> None:
        torch.autograd.backward(self.weight * loss_of(self.model(self.images)))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        whole = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad
            for name, grad in gradients_of(self.model).items()
        }
        return whole if self.work.device == 0 else {}

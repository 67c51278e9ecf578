"""Norms and small blocks of layers, as cases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import Build, Case, Fn, fn, ramp
from torch import Tensor, nn


class Twice(nn.Module):
    """One module used twice, at two sizes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(F.max_pool2d(self.module(x).tanh(), 2))


class ForNobody(nn.Module):
    """A module whose result is not used; its running statistics move all the same."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        self.module(x * 2)
        return x.relu()


class SqueezeExcite(nn.Module):
    """Scales channels by what the whole map looks like."""

    def __init__(self, channels: int, *, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        kind = nn.Linear if linear else (lambda a, b: nn.Conv2d(a, b, 1))
        self.squeeze, self.excite = kind(channels, 3), kind(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean((2, 3)) if self.linear else F.adaptive_avg_pool2d(x, 1)
        y = self.excite(F.relu(self.squeeze(y), inplace=True)).sigmoid()
        return x * (y[:, :, None, None] if self.linear else y)


def _spatial_attention(x: Tensor, weight: Tensor) -> Tensor:
    seen = torch.cat([x.mean(1, keepdim=True), torch.max(x, 1, keepdim=True)[0]], 1)
    return x * F.conv2d(seen, weight, padding=3).sigmoid()


BLOCKS: dict[str, Case | Build] = {
    "squeeze-excite convs": lambda: SqueezeExcite(4, linear=False),
    "squeeze-excite linears": lambda: SqueezeExcite(4, linear=True),
    "spatial attention": fn(_spatial_attention, ramp(1, 2, 7, 7) / 40),
    "coordinate attention": fn(lambda x: x * x.mean(3, True).sigmoid() * x.mean(2, True)),
    "response norm": fn(
        lambda x, g: x * g * (lambda n: n / (n.mean(1, True) + 1e-6))(x.norm(2, (2, 3), True)),
        ramp(1, 4, 1, 1),
    ),
    "two outputs": fn(lambda x: (F.max_pool2d(x, 2), {"a": x.mean((2, 3)), "b": (x * 2, x.sum())})),
    "no operator": fn(lambda x: x),
}  # fmt: skip


def _cumulative() -> nn.Module:
    """A cumulative average that is under way."""
    norm = nn.BatchNorm2d(4, momentum=None)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 3
    return norm


def _pooled(*behind: nn.Module, weights: tuple[float, ...] = (0.5, -2.0, 0.0, 1.5)) -> Build:
    """A norm that turns one channel round and levels another, and a pool further on."""

    def build() -> nn.Module:
        norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            norm.weight.copy_(torch.tensor(weights))
            norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3, -0.4]))
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, *behind)

    return build


NORMS: dict[str, Case | Build] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm eval": lambda: nn.BatchNorm2d(4).eval(),
    "batch norm momentum": lambda: nn.BatchNorm2d(4, momentum=0.7, eps=0.1),
    "batch norm cumulative": _cumulative,
    "batch norm plain": lambda: nn.BatchNorm2d(4, affine=False),
    "batch norm untracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch norm untracked eval": lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
    "batch norm before a pool": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(2)),
    "batch norm before a stride": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, 3)),
    "batch norm before a crop": lambda: nn.Sequential(
        nn.BatchNorm2d(4), Fn(lambda x: x[:, :, 5:9, 30:])
    ),
    "batch norm twice": lambda: Twice(nn.BatchNorm2d(4)),
    "batch norm for nobody": Case(lambda: ForNobody(nn.BatchNorm2d(4)), ends=True),
    "batch norm 67": Case(
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(2)), maps=((1, 4, 67, 67),)
    ),
    "turning norm before a pool": _pooled(nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
    "turning norm before a pool 3": _pooled(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3)),
    "turning norm before a pool 5": _pooled(nn.Tanh(), nn.MaxPool2d(5, 3)),
    "turning norm before two pools": _pooled(
        nn.ReLU6(), nn.MaxPool2d(2), nn.Sigmoid(), nn.MaxPool2d((2, 1))
    ),
    "turning norm eval before a pool": lambda: _pooled(nn.ReLU(), nn.MaxPool2d(2))().eval(),
    "rising norm before a pool": _pooled(
        nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3), weights=(0.5, 2.0, 1.0, 1.5)
    ),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm plain": lambda: nn.GroupNorm(4, 4, affine=False),
    "group norm of all": lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.AvgPool2d(2)),
    "instance norm": lambda: nn.InstanceNorm2d(4),
    "instance norm affine": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance norm tracked": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "instance norm eval": lambda: nn.InstanceNorm2d(4, track_running_stats=True).eval(),
    "local response norm": Case(lambda: nn.LocalResponseNorm(3), ends=True),
}

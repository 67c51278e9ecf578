"""Random models by random plans against plain PyTorch: does any combination differ silently?

    terrazzo run --on 3 tools/fuzz_exactness.py --minutes 5
    terrazzo run --on 3 tools/fuzz_exactness.py --seed 1234 --cases 1      # one of them again
    ONEDNN_MAX_CPU_ISA=SSE41 terrazzo run --on 2 tools/fuzz_exactness.py   # as on a board

Every case draws a model, sizes of its input, which parameters are frozen, which norms are in
evaluation mode, and a plan: ends of groups, layouts and passes. Two steps in float64 are compared,
with other parameters frozen in the second. Refusals are counted. The first difference ends the run
and says how to see it again.
"""

from __future__ import annotations

import argparse
import copy
import random
import time

import torch
from random_plan import random_plan
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.checking import compare_with_plain
from terrazzo.errors import TerrazzoError
from terrazzo.graph.export import export
from terrazzo.planner.layouts import candidates

TOLERANCE = 1e-9
"""Of float64; a wrong number is off by far more."""
LAYERS = (3, 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    options = parser.parse_args()
    device = tz.init()
    torch.set_num_threads(1)
    end_s, refused, number = time.monotonic() + 60 * options.minutes, 0, 0
    while number < options.cases and not tz.agree(int(time.monotonic() > end_s)):
        seed = options.seed + number
        number += 1
        try:
            said = case(seed)
        except Exception:
            print(f"seed {seed} ended in an error", flush=True)
            raise
        refused += bool(said)
        if device == 0 and (said or number % 20 == 0):
            print(f"{number} cases, {refused} refused{f'; seed {seed}: {said}' if said else ''}")
    if device == 0:
        print(f"{number} cases, {refused} refused, none differs")


def case(seed: int) -> str:
    """Why it was refused; nothing if it ran."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = Model(draw).double()
    size = (draw.randint(1, 4), 3, draw.randint(9, 34), draw.randint(9, 34))
    x = torch.randn(size, dtype=torch.float64)
    freeze(model, draw)
    plain = copy.deepcopy(model)
    try:
        copy.deepcopy(model)(x)
    except (RuntimeError, ValueError) as error:
        return f"plain PyTorch: {error}"[:160]
    try:
        graph = export(model, (x,)).graph
        layouts = candidates(graph, [draw.choice((1.0, 1.0, 2.0)) for _ in range(devices)])
        plan = random_plan(
            graph, layouts, draw, devices=devices, borders=(0, 5), passes=(0, 0, 0, 2, 3)
        )
        net = tz.parallelize(model, (x,), plan)
        for step in range(2):
            for one in (plain, net):
                one.zero_grad()
                if step:
                    freeze(one, random.Random(seed + 1), norms=False)
            report = compare_with_plain(plain, net, (x,), tolerance=TOLERANCE)
            bad = [row for row in report.rows if not row.worst <= row.tolerance]
            if bad:
                told = "; ".join(f"{row.what} {row.worst:.1e} at {row.where}" for row in bad)
                raise SystemExit(f"seed {seed}, step {step}: {told}\n{model}\n{plan}")
    except TerrazzoError as error:
        return f"{type(error).__name__}: {error}"[:160]
    return ""


def freeze(model: nn.Module, draw: random.Random, *, norms: bool = True) -> None:
    """No parameter, a half, or all but one and the head's: a bias before a norm has a gradient of
    zero, and needs another one to be held against. And some norms."""
    how = draw.choice(("nothing", "half", "one", "half"))
    parameters = dict(model.named_parameters())
    kept = draw.choice(list(parameters))
    for name, parameter in parameters.items():
        trained = {"nothing": True, "half": draw.random() < 0.5, "one": False}[how]
        parameter.requires_grad_(trained or name in (kept, "head.weight"))
    for layer in model.modules() if norms else ():
        if isinstance(layer, nn.BatchNorm2d) and draw.random() < 0.2:
            layer.eval()


# ---- models --------------------------------------------------------------------------------------


class Model(nn.Module):
    """A chain of layers, residual branches, gates and joins, and one or two results."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        channels, layers = 3, []
        for _ in range(draw.randint(*LAYERS)):
            layer, channels = random_layer(draw, channels)
            layers.append(layer)
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, 3, draw.choice((1, 3)), padding=1)
        self.classes = nn.Linear(channels, 4) if draw.random() < 0.4 else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x)
        map_ = self.head(x)
        return map_ if self.classes is None else (map_, self.classes(x.mean((2, 3))))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, *, joined: bool) -> None:
        super().__init__()
        self.inner, self.joined = inner, joined

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], 1) if self.joined else x + self.inner(x)


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 2, 1), nn.ReLU(),
            nn.Conv2d(2, channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x)


class Twice(nn.Module):
    """The same layer two times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


def random_layer(draw: random.Random, channels: int) -> tuple[nn.Module, int]:
    kind = draw.choice(
        "conv conv conv norm norm activation activation pool residual join gate up twice deep "
        "group drop turn".split()
    )
    if kind == "conv":
        return random_conv(draw, channels)
    if kind == "norm":
        return random_norm(draw, channels), channels
    if kind == "activation":
        return random_activation(draw, channels), channels
    if kind == "pool":
        return random_pool(draw), channels
    if kind in ("residual", "join"):
        inner = nn.Sequential(
            same(draw, channels), random_norm(draw, channels), random_activation(draw, channels)
        )
        return Residual(inner, joined=kind == "join"), channels * (1 + (kind == "join"))
    if kind == "gate":
        return Gate(channels), channels
    if kind == "up":
        how = draw.choice(("nearest", "bilinear"))
        return nn.Upsample(scale_factor=2, mode=how), channels
    if kind == "twice":
        return Twice(same(draw, channels)), channels
    if kind == "turn":
        made = draw.randint(2, 6)
        layer = nn.ConvTranspose2d(channels, made, draw.choice((2, 3, 4)), 2, draw.choice((0, 1)))
        return layer, made
    if kind == "deep":
        return nn.Conv2d(channels, channels, 3, padding=1, groups=channels), channels
    if kind == "drop":
        return draw.choice((nn.Dropout(0.3), nn.Dropout2d(0.3))), channels
    return nn.GroupNorm(1, channels), channels


def same(draw: random.Random, channels: int) -> nn.Module:
    """A convolution that changes no sizes."""
    size = draw.choice((1, 3, 5))
    return nn.Conv2d(channels, channels, size, padding=size // 2, bias=draw.random() < 0.6)


def random_conv(draw: random.Random, channels: int) -> tuple[nn.Module, int]:
    made, size = draw.randint(2, 8), draw.choice((1, 2, 3, 3, 3, 5))
    dilation = draw.choice((1, 1, 1, 2)) if size == 3 else 1
    layer = nn.Conv2d(
        channels,
        made,
        size,
        stride=draw.choice((1, 1, 1, 2)),
        padding=draw.randint(size // 2, size - 1) * dilation,
        dilation=dilation,
        bias=draw.random() < 0.6,
    )
    return layer, made


def random_norm(draw: random.Random, channels: int) -> nn.Module:
    """With weights of both signs."""
    layer: nn.Module = draw.choice(
        (
            nn.BatchNorm2d(channels),
            nn.BatchNorm2d(channels, momentum=0.3),
            nn.BatchNorm2d(channels, affine=False),
            nn.BatchNorm2d(channels, track_running_stats=False),
            nn.InstanceNorm2d(channels, affine=True),
        )
    )
    if layer.weight is not None:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def random_activation(draw: random.Random, channels: int) -> nn.Module:
    inplace = draw.random() < 0.5
    return draw.choice(
        (
            nn.ReLU(inplace), nn.LeakyReLU(0.1, inplace), nn.SiLU(inplace), nn.GELU(),
            nn.Hardswish(), nn.Softplus(), nn.Sigmoid(), nn.PReLU(channels), nn.ReLU6(inplace),
        )
    )  # fmt: skip


def random_pool(draw: random.Random) -> nn.Module:
    return draw.choice(
        (
            nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2),
            nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

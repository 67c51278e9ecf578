"""Whole networks: ordinary architectures, awkward structures, and random ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from exports import one_export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import terrazzo as tz

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from architectures import ARCHITECTURES, conv_norm
from blocks import SqueezeExcite

Build = Callable[[], nn.Module]


# ---- architectures ----------------------------------------------------------------------------


def architecture(name: str, folder: Path) -> list[tuple[bool, float, float, str]]:
    torch.manual_seed(1)
    model, x = ARCHITECTURES[name](), torch.randn(2, 3, 67, 93)
    with one_export(folder / "architecture"):
        reports = [
            tz.check(model, (x,), layout=layout, groups=groups)
            for layout, groups in (("tiles:2x2", "each"), ("tiles:3,1,0,2x1", "one"))
        ]
    return [(r.ok, r.split_flops, r.split_bytes, f"{name}\n{r}") for r in reports]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path) -> None:
    """The same numbers, and nearly all of the work runs split."""
    for device in run_on(4, architecture, name, tmp_path):
        for ok, flops, size, text in device:
            assert ok, text
            assert flops >= 0.95 and size >= 0.95, text


# ---- structures -------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two maps and a vector go in; a dictionary with lists comes out, one part unused inside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 4, 3, 2, 1)
        self.gate, self.idle = nn.Linear(5, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, v: Tensor, scale: float = 2.0) -> dict[str, object]:
        a = self.left(x) * self.gate(v).sigmoid()[:, :, None, None]
        b = F.interpolate(self.right(y), size=a.shape[-2:], mode="nearest")
        joined = F.max_pool2d(a + b, 3, 2, 1)
        return {"map": joined * scale, "parts": [a.mean((2, 3)), b.amax((2, 3))], "same": joined}


class Shared(nn.Module):
    """One convolution at two scales, and another that borrows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, 2, 1)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        small = self.norm(self.one(F.avg_pool2d(x, 2)))
        return self.norm(self.other(x)) * small.mean() + F.interpolate(
            self.one(small), size=((x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
        )


class Outputs(nn.Module):
    """Several results; who uses one of them must not pay for, or touch, the others."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.never = conv_norm(3, 4), nn.Conv2d(1, 1, 1)
        self.a, self.b, self.c = nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 5, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        y = self.trunk(x)
        return self.a(y), self.b(y), self.c(y.mean((2, 3))), (y > 0).sum(), y.detach()


class Recurrent(nn.Module):
    """The same cell three times, its state starting from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Conv2d(5, 2, 3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 2, *x.shape[2:])
        for _ in range(3):
            state = torch.tanh(self.cell(torch.cat([x, state], 1)))
        return state


def doubles(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(2)
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)


STRUCTURES: dict[str, tuple[Build, tuple[tuple[int, ...], ...]]] = {
    "branches": (Branches, ((2, 3, 33, 35), (2, 2, 21, 18), (2, 5))),
    "shared": (Shared, ((2, 3, 33, 35),)),
    "outputs": (Outputs, ((2, 3, 33, 35),)),
    "recurrent": (Recurrent, ((2, 3, 33, 35),)),
}


def structure(name: str, layout: str, groups: str, folder: Path) -> tuple[bool, str]:
    build, shapes = STRUCTURES[name]
    torch.manual_seed(4)
    with one_export(folder / name):
        report = tz.check(build(), doubles(*shapes), layout=layout, groups=groups)
    return report.ok, f"{name}\n{report}"


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str, tmp_path: Path) -> None:
    for devices, layout, groups in (
        (2, "tiles:1x2", "each"), (3, "tiles:2,0,3x1", "one"), (4, "tiles:1,2x2,1", "2"),
    ):  # fmt: skip
        for ok, text in run_on(devices, structure, name, layout, groups, tmp_path):
            assert ok, text


def used_outputs(used: tuple[int, ...], path: Path) -> list[str]:
    """Uses some outputs; compares gradients with plain PyTorch's, None included."""
    torch.manual_seed(4)
    plain = Outputs().double()
    with one_export(path):
        net = tz.parallelize(copy.deepcopy(plain), doubles((2, 3, 33, 35)), seed=0)
    (x,) = doubles((2, 3, 33, 35))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, given_ in zip((plain, net), inputs, strict=True):
        results = model(given_)
        assert [r.requires_grad for r in results] == [True, True, True, False, False]
        sum(results[place].square().sum() for place in used).backward()
    expected = {"input": inputs[0].grad, **{n: p.grad for n, p in plain.named_parameters()}}
    found = {"input": inputs[1].grad, **{n: p.grad for n, p in net.named_parameters()}}
    wrong = [n for n in expected if (expected[n] is None) != (found[n] is None)]
    return wrong + [
        name
        for name, grad in expected.items()
        if grad is not None and found[name] is not None and (grad - found[name]).abs().max() > 1e-9
    ]


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_outputs_nobody_uses_leave_no_gradient(used: tuple[int, ...], outputs: Path) -> None:
    assert run_on(3, used_outputs, used, outputs) == [[], [], []]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the one export of the model with several results is."""
    return tmp_path_factory.mktemp("outputs") / "export"


# ---- random networks --------------------------------------------------------------------------

Layer = tuple[str, int, int, int]


class Around(nn.Module):
    """A layer and a way around it: added where shapes allow, else joined."""

    def __init__(self, inner: nn.Module, *, join: bool) -> None:
        super().__init__()
        self.inner, self.join = inner, join

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cat([x, y], 1) if self.join else x * y.sigmoid() + y


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((2, 3), keepdim=True) + 0.1 * x.amax(3, keepdim=True)


class Cropped(nn.Module):
    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows :, : x.shape[3] - self.cols]


def make(layer: Layer, channels: int) -> nn.Module:
    """A layer from three small numbers."""
    kind, a, b, c = layer
    wide = 2 + c
    return {
        "conv": lambda: nn.Conv2d(channels, wide, 1 + a, 1 + b % 2, c, dilation=1 + (a + c) % 3),
        "depthwise": lambda: nn.Conv2d(channels, channels, 3, 1 + a % 2, b, groups=channels),
        "up": lambda: nn.ConvTranspose2d(channels, wide, 1 + a, 1 + b, min(a, c)),
        "max pool": lambda: nn.MaxPool2d(2 + a, 1 + b, min(c, (2 + a) // 2), ceil_mode=c > 1),
        "avg pool": lambda: nn.AvgPool2d(2 + a, 1 + b, min(c, (2 + a) // 2), c > 1, b > 1),
        "adaptive": lambda: nn.AdaptiveAvgPool2d((3 + 2 * a, 4 + 3 * b)),
        "batch norm": lambda: nn.BatchNorm2d(channels),
        "group norm": lambda: nn.GroupNorm(1, channels),
        "instance norm": lambda: nn.InstanceNorm2d(channels, affine=True),
        "activation": lambda: (nn.ReLU(), nn.SiLU(), nn.GELU(), nn.PReLU())[a],
        "nearest": lambda: nn.Upsample(scale_factor=(1.5, 2, 0.6, 3)[a]),
        "bilinear": lambda: nn.Upsample(
            scale_factor=(2, 1.6, 0.7, 3)[a], mode="bilinear", align_corners=b > 1
        ),
        "pad": lambda: PADS[b % 3]((a, 1, c, 2)),
        "crop": lambda: Cropped(a, b),
        "excite": lambda: SqueezeExcite(channels, linear=a > 1),
        "around": lambda: Around(nn.Conv2d(channels, channels, 3, padding=1), join=a > 1),
        "centred": Centred,
        "dropout": lambda: (nn.Dropout(0.3), nn.Dropout2d(0.3))[a % 2],
    }[kind]()  # fmt: skip


PADS = (nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d)
KINDS = """conv conv depthwise up max_pool avg_pool adaptive batch_norm group_norm instance_norm
    activation nearest bilinear pad crop excite around centred dropout""".split()


def drawn(layers: list[Layer], x: Tensor) -> nn.Module:
    """Stacks what fits: a layer that plain PyTorch refuses here, or that blows up, is left out."""
    torch.manual_seed(9)
    stack: list[nn.Module] = [nn.Conv2d(x.shape[1], 4, 3, padding=1).double()]
    y = stack[0](x)
    for layer in layers:
        module = make((layer[0].replace("_", " "), *layer[1:]), y.shape[1]).double()
        try:
            result = copy.deepcopy(module)(y)
        except (RuntimeError, ValueError):
            continue
        if 0 < result.shape[2] * result.shape[3] <= 4000:
            stack.append(module)
            y = result
    return nn.Sequential(*stack, nn.Conv2d(y.shape[1], 2, 3, padding=1).double())


def random_network(
    layers: list[Layer], size: tuple[int, int], layout: tz.Layout, groups: str
) -> tuple[bool, str]:
    (x,) = doubles((2, 3, *size))
    model = drawn(layers, x)
    report = tz.check(model, (x,), layout=layout, groups=groups)
    return report.ok, f"{model}\n{x.shape} {layout} {groups}\n{report}"


small = st.integers(0, 3)
stacks = st.lists(st.tuples(st.sampled_from(KINDS), small, small, small), min_size=3, max_size=6)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, tz.Layout]:
    """Shares, some of them nothing, for two to four devices."""
    devices = draw(st.integers(2, 4))
    rows = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    shares = [
        draw(st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(any))
        for n in (rows, devices // rows)
    ]
    return devices, tz.Layout.tiles(tuple(shares[0]), tuple(shares[1]))


@settings(
    derandomize=True,
    deadline=None,
    max_examples=16,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    layers=stacks,
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    cut=cuts(),
    groups=st.sampled_from(["each", "one", "1"]),
)
def test_random_networks(
    layers: list[Layer], size: tuple[int, int], cut: tuple[int, tz.Layout], groups: str
) -> None:
    devices, layout = cut
    for ok, text in run_on(devices, random_network, layers, size, layout, groups):
        assert ok, text

"""Every operator of the table on real devices: convolutions before and after, cut in all ways.

Cases run side by side in one model, because exporting it costs more than running it. When a
bundle is wrong its cases run again alone, so that the failure names them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from devices import run_on
from exports import one_export
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import terrazzo as tz
from terrazzo.schedule import passes as passes_

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from case import Case, bundle, label
from cases import TABLES


class Stacked(nn.Module):
    """A case between convolutions: a gradient lost at its border shows in their weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case.module()
        torch.manual_seed(6)
        inputs = case.inputs()
        self.before = nn.ModuleList(
            nn.Conv2d(shape[1], shape[1], 3, padding=1, dtype=torch.float64)
            for shape in (() if case.bare else case.maps)
        )
        leaves = pytree.tree_leaves(self.operator(*inputs))
        self.after = nn.ModuleList(
            nn.Conv2d(leaf.shape[1], 2, 3, padding=1, dtype=torch.float64)
            if is_map(leaf)
            else nn.Identity()
            for leaf in leaves
        )

    def operator(self, *inputs: Tensor) -> object:
        maps = [m(x) for m, x in zip(self.before, inputs, strict=False)]
        return self.case(*maps, *inputs[len(maps) :])

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        leaves = pytree.tree_leaves(self.operator(*inputs))
        return [after(leaf) for after, leaf in zip(self.after, leaves, strict=True)]


def is_map(leaf: Tensor) -> bool:
    return leaf.dim() == 4 and leaf.is_floating_point() and leaf.shape[2] * leaf.shape[3] > 1


PLANS = {
    2: [("tiles:1x1,4", "each", 2), ("samples:2", "each", 0), ("channels:2", "one", 0)],
    3: [("tiles:3x1", "one", 3), ("samples:1,2,1", "one", 2), ("channels:2,0,1", "each", 0)],
    4: [("tiles:3,2x1,2", "each", 0), ("tiles:3,0,2,1x1", "one", 0)],
}
MIXTURES = [("samples:2+channels:2", "each", 0), ("channels:1,2+tiles:2x1", "one", 0)]
"""What has weights or statistics meets both on four devices, the rest one, by turns."""

Wish = tuple[str, str, int]
Wrong = list[str]


@contextmanager
def short_strips() -> Iterator[None]:
    """Inside, passes cut maps of any size, however small."""
    usual = passes_.STRIP_BYTES
    passes_.STRIP_BYTES = 1
    try:
        yield
    finally:
        passes_.STRIP_BYTES = usual


def check(title: str, names: list[str], plans: list[Wish], path: Path) -> Wrong:
    """The plans under which some of these cases are wrong, with their reports."""
    model, inputs = bundle({name: TABLES[title][name] for name in names}, Stacked)
    wrong = []
    with one_export(path), short_strips():
        for layout, groups, passes in plans:
            report = tz.check(model, inputs, layout=layout, groups=groups, passes=passes)
            if not report.ok:
                plan = f"{layout}, groups {groups}, {passes} passes"
                wrong.append(f"{title}: {names} in {plan}\n{report}")
    return wrong


def scene(title: str, names: list[str], plans: list[Wish], folder: Path) -> Wrong:
    """What is wrong; when something is, case by case."""
    wrong = check(title, names, plans, folder / "together")
    if not wrong:
        return []
    alone = [check(title, [name], plans, folder / f"alone {label(name)}") for name in names]
    return [line for lines in alone for line in lines] or wrong


SIZE = 24
BUNDLES = [
    (title, list(table)[start : start + SIZE])
    for title, table in TABLES.items()
    for start in range(0, len(table), SIZE)
]


@pytest.mark.parametrize(
    ("number", "title", "names"),
    [
        pytest.param(number, title, names, id=f"{title}-{names[0]}")
        for number, (title, names) in enumerate(BUNDLES)
    ],
)
def test_operators(number: int, title: str, names: list[str], tmp_path: Path) -> None:
    both = title in ("convolutions", "norms", "blocks")
    four = [*PLANS[4], *(MIXTURES if both else [MIXTURES[number % 2]])]
    few = 2 + number % 2
    for devices, plans in ((4, four), (few, PLANS[few])):
        for wrong in run_on(devices, scene, title, names, plans, tmp_path):
            assert not wrong, "\n".join(wrong)


# ---- awkward cuts -----------------------------------------------------------------------------


def thin() -> nn.Module:
    """Halos far wider than a tile: the reach is 16 rows, a tile has 3."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=8, dilation=8), nn.BatchNorm2d(3), nn.Tanh(),
        nn.Conv2d(3, 3, 3, padding=8, dilation=8), nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 5),
    )  # fmt: skip


def shrinking() -> nn.Module:
    """Maps of fewer rows than devices, down to one."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 4, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


CUTS: dict[str, list[tuple[Callable[[], nn.Module], tuple[int, ...], str, str]]] = {
    "4 devices": [
        (thin, (1, 2, 13, 17), "tiles:4x1", "one"),
        (thin, (1, 2, 13, 17), "tiles:1x4", "each"),
        (thin, (2, 2, 13, 17), "tiles:5,1,1,1x1", "2"),
        (shrinking, (2, 2, 3, 9), "tiles:4x1", "each"),
        (shrinking, (2, 2, 3, 9), "tiles:4x1", "one"),
        (shrinking, (2, 2, 1, 7), "tiles:4x1", "one"),
        (shrinking, (2, 2, 2, 2), "tiles:2x2", "each"),
        (shrinking, (1, 2, 33, 35), "tiles:0,1,0,2x1", "one"),
        (shrinking, (1, 2, 33, 35), "tiles:0,1x1,0", "each"),
        (shrinking, (1, 2, 33, 35), "whole", "each"),
    ],
    "6 devices": [
        (thin, (1, 2, 13, 17), "tiles:3x2", "one"),
        (shrinking, (2, 2, 5, 9), "tiles:6x1", "each"),
        (shrinking, (2, 2, 67, 93), "tiles:2x3,1,2", "each"),
        (shrinking, (1, 2, 67, 93), "tiles:1,2,4x2,3", "one"),
    ],
}


def cut(title: str, folder: Path) -> list[str]:
    wrong = []
    for build, shape, layout, groups in CUTS[title]:
        torch.manual_seed(8)
        model, x = build(), torch.randn(shape)
        with one_export(folder / label(f"{build.__name__} {shape}")):
            report = tz.check(model, (x,), layout=layout, groups=groups)
        if not report.ok:
            wrong.append(f"{build.__name__} {shape} {layout} {groups}\n{report}")
    return wrong


@pytest.mark.parametrize("title", CUTS)
def test_awkward_cuts(title: str, tmp_path: Path) -> None:
    for wrong in run_on(int(title[0]), cut, title, tmp_path):
        assert not wrong, "\n".join(wrong)

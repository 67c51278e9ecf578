"""Programs as integers: whatever the plan, every step finds what it reads, and nothing is lost."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

from terrazzo.errors import PlanError
from terrazzo.geometry import Box
from terrazzo.graph.export import export
from terrazzo.graph.rules import Local
from terrazzo.planner import plan_graph
from terrazzo.records import Graph, Group, Layout, Plan
from terrazzo.schedule import (
    Arrive,
    Combine,
    Compute,
    Exchange,
    Passes,
    Program,
    Spread,
    Take,
    lower,
    passes,
    split_shares,
    traffic,
)
from terrazzo.schedule.gradient import differentiable, reached
from terrazzo.schedule.tiling import Tiling, owned

sys.path.insert(0, str(Path(__file__).parent))
from case import bundle
from cases import TABLES

SETS = {
    "windows": {n: TABLES["convolutions"][n] for n in list(TABLES["convolutions"])[::5]}
    | {n: TABLES["pools"][n] for n in list(TABLES["pools"])[::5]},
    "rest": {
        n: TABLES[title][n]
        for title in ("resizes", "reductions", "shapes", "blocks", "norms", "losses")
        for n in list(TABLES[title])[1::9]
    },
}


class Deep(nn.Module):
    """Four windows deep, with a norm, a skip and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(3, 1, 1))
        self.tail, self.head = nn.Conv2d(4, 4, 3, 2, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.tail(x + self.body(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def _short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes cut maps of any size, however small."""
    monkeypatch.setattr(passes, "STRIP_BYTES", 1)


@cache
def graph_of(title: str) -> Graph:
    if title == "deep":
        return export(Deep(), (torch.zeros(1, 3, 16, 10),)).graph
    model, inputs = bundle(SETS[title])
    return export(model, inputs).graph


def layouts(seed: int) -> Iterator[Layout]:
    """Uneven grids for two to six devices, some shares nothing."""
    draw = random.Random(seed)
    for rows, cols in ((2, 1), (1, 3), (2, 2), (3, 2)):
        shares = [[draw.randint(0, 4) for _ in range(n)] for n in (rows, cols)]
        yield Layout.tiles(*(tuple(s) if any(s) else len(s) for s in shares))


def programs(title: str) -> Iterator[Program]:
    graph = graph_of(title)
    for seed, groups in enumerate(("each", "one", 3)):
        for layout in layouts(seed):
            for count in (0, 2):
                plan = plan_graph(graph, layout.devices, layout=layout, groups=groups, passes=count)
                yield lower(graph, plan)


# ---- boxes ------------------------------------------------------------------------------------


def disjoint_cover(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    whole = Box.whole(shape)
    apart = all(one.intersect(other).is_empty for one, other in combinations(boxes, 2) if one.rank)
    return apart and sum(box.size for box in boxes) == whole.size


@pytest.mark.parametrize("axes", ["..hw", "..wh", "h..", ".w", "hw", "...", "w.h."])
def test_tiles_are_a_disjoint_cover_for_any_letters(axes: str) -> None:
    """Also where an axis is missing: then one device of the row owns, the others nothing."""
    shape = tuple(range(3, 3 + len(axes)))
    for seed in range(20):
        for layout in layouts(seed):
            boxes = owned(shape, axes, layout)
            assert len(boxes) == layout.devices and disjoint_cover(boxes, shape)


@pytest.mark.parametrize("title", [*SETS, "deep"])
def test_what_devices_compute_covers_what_leaves(title: str) -> None:
    graph = graph_of(title)
    for layout in layouts(7):
        plan = plan_graph(graph, layout.devices, layout=layout, groups="each")
        program = lower(graph, plan)
        tiling = Tiling(program.graph, plan)
        for (group, name), needed in tiling.needed.items():
            producer = program.graph.producer.get(name)
            if producer is None or tiling.groups[producer] == group:
                continue
            for tile, made in zip(tiling.made_tiles(name), tiling.computed[name], strict=True):
                assert made.contains(tile), f"{name} leaves its group, a tile is not computed"
            assert all(Box.whole(program.graph.shape(name)).contains(box) for box in needed)


# ---- steps ------------------------------------------------------------------------------------


def locals_of(program: Program) -> Iterator[tuple[tuple[str, ...], int, Local]]:
    """(arrays, device, local) of every call on a device."""
    for step in program.steps:
        if isinstance(step, Compute):
            for apply in step.applies:
                for device, local in enumerate(apply.locals or ()):
                    if local:
                        yield apply.inputs, device, local
        elif isinstance(step, Combine):
            for device, local in enumerate(step.parts):
                if local:
                    yield step.inputs, device, local
        elif isinstance(step, Passes):
            for device, strips in enumerate(step.strips):
                for strip in strips:
                    for arrays, local in zip(step.inputs, strip.locals, strict=True):
                        yield arrays, device, local


def held(program: Program, name: str, device: int) -> Box:
    array = program.arrays[name]
    if array.boxes is None:
        return Box.whole(program.graph.shape(array.value))
    return array.boxes[device]


@pytest.mark.parametrize("title", [*SETS, "deep"])
def test_every_read_is_there(title: str) -> None:
    for program in programs(title):
        for arrays, device, local in locals_of(program):
            for name, read in zip(arrays, local.reads, strict=True):
                assert not name or held(program, name, device).contains(read.box), (
                    f"device {device} reads {read.box} of {name}, holds "
                    f"{held(program, name, device)} under\n{program.plan}"
                )


@pytest.mark.parametrize("title", [*SETS, "deep"])
def test_every_exchange_delivers_what_was_asked_for(title: str) -> None:
    for program in programs(title):
        for step in program.steps:
            for move in step.moves if isinstance(step, Exchange) else ():
                for device in range(program.devices):
                    arrived = [t.box for t in move.transfers if t.destination == device]
                    wanted = held(program, move.target, device)
                    assert all(wanted.contains(box) for box in arrived)
                    assert sum(box.size for box in arrived) == wanted.size
                    assert all(a.intersect(b).is_empty for a, b in combinations(arrived, 2))
                for transfer in move.transfers:
                    assert held(program, move.source, transfer.source).contains(transfer.box)


@pytest.mark.parametrize("title", [*SETS, "deep"])
def test_arrays_are_made_before_they_are_read(title: str) -> None:
    for program in programs(title):
        leaves = {n for n in program.graph.values if n not in program.graph.producer}
        known = set(leaves)
        for step in program.steps:
            if isinstance(step, (Take, Spread)):
                pairs = [((step.source,), (step.target,))]
            elif isinstance(step, Exchange):
                pairs = [((move.source,), (move.target,)) for move in step.moves]
            elif isinstance(step, Compute):
                pairs = [(apply.inputs, apply.outputs) for apply in step.applies]
            elif isinstance(step, Passes):
                pairs = [(step.reads, (step.target,))]
            elif isinstance(step, Arrive):
                pairs = [(step.targets, ())]
            else:
                pairs = [(step.inputs, (step.target,))]
            for reads, writes in pairs:
                assert set(reads) <= known, f"{set(reads) - known} is read before it is made"
                known |= set(writes)
        assert set(program.outputs.values()) <= known
        assert all(program.arrays[name].is_whole for name in program.outputs.values())


@pytest.mark.parametrize("title", [*SETS, "deep"])
def test_what_is_given_covers_what_is_taken(title: str) -> None:
    for program in programs(title):
        for step in program.steps:
            if isinstance(step, Take):
                for device, given in enumerate(program.given[step.source]):
                    assert given.contains(held(program, step.target, device))


# ---- plans that do not fit --------------------------------------------------------------------


def test_plans_for_something_else_are_refused() -> None:
    graph = graph_of("deep")
    plan = plan_graph(graph, 2, layout="tiles:2x1", groups="each")
    tiles = Layout.tiles(2)
    with pytest.raises(PlanError, match="was made for model other"):
        lower(graph, Plan("other", 2, plan.groups))
    with pytest.raises(PlanError, match=r"cut for 2 devices .* plan is for 3"):
        lower(graph, Plan(graph.digest, 3, plan.groups))
    with pytest.raises(PlanError, match="should end at 'nowhere'"):
        lower(graph, Plan(graph.digest, 2, (Group("nowhere", tiles), *plan.groups)))
    with pytest.raises(PlanError, match=r"ends group .* at 'nowhere', which this model"):
        lower(graph, Plan(graph.digest, 2, (*plan.groups, Group("nowhere", tiles))))


# ---- shares, traffic, gradients ---------------------------------------------------------------


def chain() -> Graph:
    """Two 3x3 convolutions on eight rows of ten, two channels each, in float32."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 2, 3, padding=1, bias=False)
    )
    return export(model, (torch.zeros(1, 2, 8, 10),)).graph


def test_traffic_of_two_convolutions_by_hand() -> None:
    graph = chain()
    weights = {v.name for v in graph.values.values() if v.kind == "parameter"}
    row, whole, weight = 2 * 10 * 4, 2 * 8 * 10 * 4, 2 * 2 * 9 * 4
    each = lower(graph, plan_graph(graph, 2, layout="tiles:2x1", groups="each"))
    seen = traffic(each, differentiable(each, weights))
    # one row forwards and its gradient back, then the result to everybody; both weights summed
    assert seen.sent_bytes == (2 * row + whole // 2,) * 2
    assert seen.summed_bytes == (2 * weight,) * 2
    one = lower(graph, plan_graph(graph, 2, layout="tiles:3,1x1", groups="one"))
    seen = traffic(one, differentiable(one, weights))
    assert seen.sent_bytes == (whole * 6 // 8, whole * 2 // 8)  # recomputed, nothing exchanged
    frozen = traffic(each, differentiable(each, set()))
    assert frozen.sent_bytes == (row + whole // 2,) * 2 and frozen.summed_bytes == (0, 0)


def test_shares_tell_split_from_whole() -> None:
    graph = graph_of("deep")
    for layout, share in (("tiles:2x1", 1.0), ("whole", 0.0)):
        shares = split_shares(lower(graph, plan_graph(graph, 2, layout=layout, groups="each")))
        assert shares.flops == pytest.approx(share, abs=0.02)
        assert shares.bytes == pytest.approx(share, abs=0.02)


def test_gradients_reach_only_what_was_asked_for() -> None:
    graph = graph_of("deep")
    program = lower(graph, plan_graph(graph, 2, layout="tiles:2x1", groups="each"))
    weights = {v.target: v.name for v in graph.values.values() if v.kind == "parameter"}
    result = frozenset(program.outputs[ref.name] for ref in graph.outputs)  # type: ignore[union-attr]
    head = differentiable(program, {weights["head.weight"]})
    assert result <= head and not any(name.startswith(graph.inputs[0]) for name in head)
    everything = differentiable(program, set(weights.values()))
    live = reached(program, everything, result)
    assert set(weights.values()) <= live <= everything
    assert reached(program, everything, frozenset()) == frozenset()
    assert len(head) < len(everything) / 4, "a frozen trunk carries no gradient"

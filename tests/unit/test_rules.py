"""Every rule against the whole operator: boxes computed one by one give the same numbers.

Runs in one process: each device's box is computed from slices of the whole tensors, so what fails
here is the arithmetic of a rule or its kernel, not the exchange.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.geometry import Box, Span, cut
from terrazzo.graph.export import export
from terrazzo.graph.rules import LOCAL, REDUCE, WHOLE, Letters, Local, place, rule_for
from terrazzo.graph.rules.rule import is_cut
from terrazzo.graph.rules.windows import sums_channels
from terrazzo.records import Graph, Layout, Node
from terrazzo.runtime.kernels import Site, kernel
from terrazzo.runtime.operators import local_operator, whole_operator
from terrazzo.schedule.tiling import owned

sys.path.insert(0, str(Path(__file__).parent))
from case import Case, bundle, label
from cases import TABLES

Values = dict[str, Tensor]


class Table:
    """One table of cases as a graph, with the letters and the contents of every value."""

    def __init__(self, title: str, mask: str) -> None:
        self.cases: dict[str, Case] = {label(n): case for n, case in TABLES[title].items()}
        model, inputs = bundle(TABLES[title])
        exported = export(model, inputs)
        self.graph: Graph = exported.graph
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state |= exported.constants
        self.values: Values = dict(zip(self.graph.inputs, inputs, strict=True))
        for tensor in inputs:
            tensor.requires_grad_(tensor.is_floating_point())
        for value in self.graph.values.values():
            if value.target:
                self.values[value.name] = state[value.target]
        self.roles: list[str] = []
        self.axes = Letters(mask, {n: "." * len(v.shape) for n, v in self.graph.values.items()})
        letters = "".join(axis if axis in mask else "." for axis in "nchw")
        for name in self.graph.inputs:
            self.axes[name] = letters if len(self.graph.shape(name)) == 4 else self.axes[name]
        for node in self.graph.nodes:
            self._run(node)

    def _run(self, node: Node) -> None:
        placement = place(node, self.graph, self.axes)
        self.axes[node.output] = placement.axes
        self.roles.append(placement.role)
        whole = whole_operator(node.op, node.args, self.graph.shape(node.output))
        result = whole([self.values[name] for name in node.refs], site)
        results = (result,) if isinstance(result, Tensor) else result
        for name, tensor in zip(node.outputs, results, strict=False):
            if name:
                self.values[name] = tensor

    def case_of(self, node: Node) -> Case:
        return self.cases[node.layer.split(".")[1]]

    def nodes(self, role: str) -> Iterator[Node]:
        return (n for n, r in zip(self.graph.nodes, self.roles, strict=True) if r == role)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The maps are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def table(title: str, mask: str = "hw") -> Table:
    return Table(title, mask)


def site(shape: tuple[int, ...], box: Box) -> Site:
    return Site(shape, box, 7, 1, torch.device("cpu"))


def layouts(draw: random.Random, mask: str = "hw") -> list[Layout]:
    """Uneven grids, with devices that own nothing; and many thin tiles."""
    if mask != "hw":
        shares = (tuple(draw.choice((0, 1, 1, 2)) for _ in range(3)) for _ in mask)
        cuts = zip(mask, (s if any(s) else (1, 2, 0) for s in shares), strict=True)
        return [Layout(tuple(cuts)), Layout(tuple((axis, (1, 1)) for axis in mask))]
    shares = [tuple(draw.choice((0, 1, 1, 2, 5)) for _ in range(3)) for _ in range(2)]
    rows, cols = (s if any(s) else (1, 2, 0) for s in shares)
    return [Layout.tiles(rows, cols), Layout.tiles((3, 1, 2), 1), Layout.tiles(1, 11)]


MASKS = ("hw", "c", "nch")
"""Tiles, channels, and a grid of several."""


def leaves(node: Node, values: Values) -> list[Tensor]:
    """Fresh copies of what a node reads, one for each place it is read at."""
    return [
        values[name].detach().clone().requires_grad_(values[name].requires_grad)
        for name in node.refs
    ]


def piece(local: Local, tensors: Sequence[Tensor], draw: random.Random) -> tuple[list[Box], list]:
    """What a device might hold: the box it reads, and now and then more around it."""
    boxes = []
    for read, tensor in zip(local.reads, tensors, strict=True):
        margin = draw.choice((0, 0, 1, 3))
        wide = Box(tuple((low - margin, high + margin) for low, high in read.box.spans))
        boxes.append(read.box if read.box.is_empty else wide.clip(tensor.shape))
    return boxes, [tensor[box.slices()] for tensor, box in zip(tensors, boxes, strict=True)]


def compute(
    local: Local, tensors: Sequence[Tensor], box: Box, *, shape: Sequence[int], draw: random.Random
) -> Tensor:
    held, pieces = piece(local, tensors, draw)
    for read, tensor in zip(local.reads, tensors, strict=True):
        assert Box.whole(tensor.shape).contains(read.box), f"reads {read.box} of {tensor.shape}"
    result = local_operator(local, held, shape=tuple(shape), box=box)(pieces, site)
    return result if isinstance(result, Tensor) else result[0]


def gradients(result: Tensor, tensors: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not result.requires_grad or not wanted:
        return []
    found = torch.autograd.grad(result, wanted, seed, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def compare(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-11, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def assemble(
    node: Node, graph: Graph, tensors: Sequence[Tensor], boxes: Sequence[Box], draw: random.Random
) -> Tensor:
    """The whole result, put together from the boxes of all devices."""
    rule = rule_for(node.op)
    assert rule is not None and rule.local is not None
    result: Tensor | None = None
    for box in boxes:
        if box.is_empty:
            continue
        made = compute(
            rule.local(node, graph, box), tensors, box, shape=graph.shape(node.output), draw=draw
        )
        assert made.shape == box.shape, f"{node.title} makes {made.shape} for {box}"
        if result is None:
            result = made.new_zeros(graph.shape(node.output))
        result = result.slice_scatter(made, 0, 0, 0) if box.rank == 0 else placed(result, made, box)
    assert result is not None
    return result


def placed(whole: Tensor, part: Tensor, box: Box) -> Tensor:
    whole = whole.clone()
    whole[box.slices()] = part
    return whole


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("title", TABLES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_boxes_of_local_operators(title: str, mask: str) -> None:
    """Forward, and the sum of all devices' input gradients."""
    draw, here = random.Random(title), table(title, mask)
    for node in here.nodes(LOCAL):
        if node.op == "aten.empty_like.default":
            continue  # holds no numbers
        tensors = leaves(node, here.values)
        whole = whole_operator(node.op, node.args, here.graph.shape(node.output))(tensors, site)
        whole = whole if isinstance(whole, Tensor) else whole[0]
        seed = torch.randn(whole.shape, dtype=torch.float64) if whole.is_floating_point() else whole
        expected = gradients(whole, tensors, seed)
        for layout in layouts(draw, mask):
            boxes = owned(here.graph.shape(node.output), here.axes[node.output], layout)
            made = assemble(node, here.graph, tensors, boxes, draw)
            what = f"{node.title} in {layout}"
            compare(made, whole, what)
            for one, other in zip(gradients(made, tensors, seed), expected, strict=True):
                compare(one, other, f"gradient of {what}")


def first(extent: int) -> Span:
    return 0, 1


def last(extent: int) -> Span:
    return extent - 1, extent


def some(draw: random.Random) -> Callable[[int], Span]:
    def pick(extent: int) -> Span:
        low, high = sorted(draw.sample(range(extent + 1), 2))
        return low, high

    return pick


@pytest.mark.parametrize("mask", ["hw", "nchw"])
@pytest.mark.parametrize("title", TABLES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_any_box_of_local_operators(title: str, mask: str) -> None:
    """A fused group asks for boxes that are no tiles: any box, also of channels and samples."""
    draw, here = random.Random(title), table(title, mask)
    for node in here.nodes(LOCAL):
        if node.op == "aten.empty_like.default":
            continue
        shape, axes = here.graph.shape(node.output), here.axes[node.output]
        for pick in (first, last, some(draw), some(draw)):
            spans = [
                (0, extent) if letter == "." else pick(extent)
                for extent, letter in zip(shape, axes, strict=True)
            ]
            box = Box(tuple(spans))
            tensors = [here.values[name] for name in node.refs]
            rule = rule_for(node.op)
            assert rule is not None and rule.local is not None
            made = compute(rule.local(node, here.graph, box), tensors, box, shape=shape, draw=draw)
            compare(made, here.values[node.output][box.slices()], f"{node.title} of {box}")


@pytest.mark.parametrize("title", TABLES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_addends_of_products(title: str) -> None:
    """Over parts of the channels that it reads, the parts of a product add up to it."""
    draw, here = random.Random(title), table(title, "c")
    for node in here.nodes(LOCAL):
        rule = rule_for(node.op)
        if rule is None or rule.sums is None or ("conv" in node.op and not sums_channels(node)):
            continue
        shape, source = here.graph.shape(node.output), here.graph.shape(node.refs[0])
        channels = source[-1] if "linear" in node.op else source[len(source) - 3]
        box = Box(tuple(some(draw)(extent) for extent in shape))
        tensors = leaves(node, here.values)
        whole = whole_operator(node.op, node.args, shape)(tensors, site)[box.slices()]
        parts = [
            compute(rule.sums(node, here.graph, box, span), tensors, box, shape=shape, draw=draw)
            for span in cut(channels, (1, 2, 0, 1))
            if span[0] < span[1]
        ]
        made = torch.stack(parts).sum(0)
        compare(made, whole, f"{node.title} of {box} from {len(parts)} parts")
        seed = torch.randn(whole.shape, dtype=torch.float64)
        pairs = zip(gradients(made, tensors, seed), gradients(whole, tensors, seed), strict=True)
        for one, other in pairs:
            compare(one, other, f"gradient of {node.title}")


def combined(parts: Sequence[Tensor], how: str) -> Tensor:
    if how == "sum":
        return torch.stack(list(parts)).sum(0)
    return torch.stack([part[0] for part in parts]).amax(0)


def reduced(
    node: Node, here: Table, tensors: Sequence[Tensor], layout: Layout, draw: random.Random
) -> Tensor:
    """A reduction as all devices make it: parts, combined, finished."""
    rule = rule_for(node.op)
    assert rule is not None and rule.reduce is not None
    reduction = rule.reduce(node, here.graph)
    name = node.refs[reduction.main]
    start = float("-inf") if reduction.rows else 0.0
    parts = []
    for box in owned(here.graph.shape(name), here.axes[name], layout):
        if box.is_empty:
            continue
        rows = (reduction.rows,) if reduction.rows else ()
        place = reduction.keeps(box)
        part = compute(
            reduction.partial(box), tensors, place, shape=reduction.shape, draw=draw
        ).double()
        full = part.new_full((*rows, *reduction.shape), start)
        full[(*(slice(None) for _ in rows), *place.slices())] = part
        parts.append(full)
    total = combined(parts, reduction.combine)
    if reduction.finish:
        total = kernel(reduction.finish)(total, *reduction.finish_args)
    return total


@pytest.mark.parametrize("mask", ["hw", "nch"])
@pytest.mark.parametrize("title", ["pools", "reductions", "blocks", "losses"])
def test_reductions(title: str, mask: str) -> None:
    """Parts of owned boxes give the whole result; sums give its gradient too."""
    draw, here = random.Random(title), table(title, mask)
    nodes = list(here.nodes(REDUCE))
    assert nodes
    for node in nodes:
        tensors = leaves(node, here.values)
        whole = whole_operator(node.op, node.args, here.graph.shape(node.output))(tensors, site)
        rule = rule_for(node.op)
        assert rule is not None and rule.reduce is not None
        sums = rule.reduce(node, here.graph).combine == "sum"
        seed = torch.randn(whole.shape, dtype=torch.float64)
        expected = gradients(whole, tensors, seed) if sums else []
        for layout in layouts(draw, mask):
            made = reduced(node, here, tensors, layout, draw)
            compare(made, whole.double(), f"{node.title} in {layout}")
            found = gradients(made, tensors, seed) if sums else []
            for one, other in zip(found, expected, strict=True):
                compare(one, other, f"gradient of {node.title} in {layout}")


@pytest.mark.parametrize("title", TABLES)
def test_only_what_mixes_positions_ends_the_tiles(title: str) -> None:
    here = table(title)
    ended = {
        node.layer.split(".")[1]: node.title
        for node in here.nodes(WHOLE)
        if any(is_cut(here.axes[name]) for name in node.refs)
    }
    meant = {name for name, case in here.cases.items() if case.ends}
    assert set(ended) == meant, {name: ended.get(name) for name in set(ended) ^ meant}


def test_draws_on_one_device_follow_the_same_keys() -> None:
    """Masks depend on seed, step, operator and position alone; other tests use more devices."""
    model, inputs = bundle(TABLES["random"])
    report = tz.check(model, inputs)
    assert report.ok, str(report)


def test_every_role_is_covered() -> None:
    """The table reaches most rules: what is missing has no place in a CNN."""
    roles = Counter(role for title in TABLES for role in table(title).roles)
    assert roles[LOCAL] > 400 and roles[REDUCE] > 50

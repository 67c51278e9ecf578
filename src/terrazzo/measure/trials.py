"""Trials: which boxes of which operators are worth timing, in the order of their worth.

Every distinct operator of a model is timed on a few boxes: all of it, parts of its rows (tiles,
samples), and parts of its channels. The star of these points is what planning interpolates in:

                rows 1/12 ─ 1/6 ─ 1/2 ─ whole
                                    ├─ outputs 1/2 ─ 1/6
                                    └─ inputs  1/2 ─ 1/6

Operators that the network spends most on come first; when time is up the rest is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from terrazzo.geometry import Box
from terrazzo.graph.expand import expand_norms
from terrazzo.graph.rules import Local, Read, rule_for
from terrazzo.planner.workload import of_local
from terrazzo.records import Graph, Node
from terrazzo.records.profile import Load

NORMS = ("terrazzo.batch_norm", "terrazzo.instance_norm", "terrazzo.group_norm")
LARGE_WEIGHTS = 4096
"""Fewer are never cut: what a cut would save is less than a message costs."""

# What is timed of every product, in this order: what tells most for its time comes first.
ROWS, OUTPUTS, INPUTS = "rows", "outputs", "inputs"
PRODUCT_PARTS = (
    (ROWS, 6), (OUTPUTS, 6), (INPUTS, 6), (ROWS, 12), (ROWS, 36), (ROWS, 1), (ROWS, 2),
    (OUTPUTS, 2), (INPUTS, 2),
)  # fmt: skip
NEARLY, LEAD = 0.8, 0.5
CHEAP_PARTS = ((ROWS, 6), (ROWS, 24), (ROWS, 1))
MOST_CHEAP = 6
"""Boxes of a family that is no product: its time follows its elements, and a few tell how."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One operator on one box, ready to be run: tensors to make are the boxes of its reads."""

    load: Load
    local: Local
    shape: tuple[int, ...]
    box: Box
    dtypes: tuple[str, ...]
    weights: tuple[int, ...]
    """Which of the reads are parameters."""
    rank: float
    """Where it stands in the order; smaller is earlier."""


def trials(graph: Graph) -> list[Trial]:
    """Everything worth timing of a model, each load once, in order."""
    norms = {index for index, node in enumerate(graph.nodes) if node.op in NORMS}
    expanded = expand_norms(graph, norms)
    nodes = [(node, graph) for node in graph.nodes if node.op in NORMS]
    nodes += [(node, expanded) for node in expanded.nodes]
    found: dict[tuple[str, Load], Trial] = {}
    for node, owner in nodes:
        for trial in _trials(node, owner):
            found.setdefault((trial.local.op, trial.load), trial)
    return sorted(_led(list(_thinned(found.values()))), key=lambda trial: trial.rank)


def _led(found: Sequence[Trial]) -> Iterator[Trial]:
    """With two of the largest of each family of products early on, of many rows and of few.

    They are dear, but no rate is believed in that is better than any that was seen.
    """
    largest: dict[str, int] = {}
    for trial in found:
        family = trial.load.family
        largest[family] = max(largest.get(family, 0), trial.load.flops)
    leading: dict[str, list[Trial]] = {}
    for trial in found:
        if trial.load.is_product and trial.load.flops >= NEARLY * largest[trial.load.family]:
            leading.setdefault(trial.load.family, []).append(trial)
    leads = set()
    for trials in leading.values():
        trials.sort(key=lambda trial: trial.load.rows)
        leads |= {trials[0].load, trials[-1].load}
    for trial in found:
        yield replace(trial, rank=min(trial.rank, LEAD)) if trial.load in leads else trial


def _thinned(found: Iterable[Trial]) -> Iterator[Trial]:
    """All products, and of each other family a few sizes from its smallest to its largest."""
    families: dict[str, list[Trial]] = {}
    for trial in found:
        families.setdefault(trial.load.family, []).append(trial)
    for trials in families.values():
        if trials[0].load.is_product or len(trials) <= MOST_CHEAP:
            yield from trials
            continue
        trials.sort(key=lambda trial: trial.load.reads)
        step = (len(trials) - 1) / (MOST_CHEAP - 1)
        yield from (trials[round(place * step)] for place in range(MOST_CHEAP))


def _trials(node: Node, graph: Graph) -> Iterator[Trial]:
    if not node.output or not node.refs:
        return
    values = [graph.values[name] for name in node.refs]
    if not all(value.is_floating for value in (*values, graph.values[node.output])):
        return  # counters and look-ups: nothing that takes time
    dtypes = tuple(value.dtype for value in values)
    weights = tuple(place for place, value in enumerate(values) if value.kind == "parameter")
    whole = _whole(node, graph)
    load = of_local(*whole)
    if load is None:
        return
    parts = PRODUCT_PARTS if load.is_product else CHEAP_PARTS
    for order, (what, count) in enumerate(parts):
        cut = whole if count == 1 else _cut(node, graph, what, count)
        if cut is None:
            continue
        local, box = cut
        small = of_local(local, box)
        assert small is not None
        yield Trial(
            load=small,
            local=local,
            shape=graph.shape(node.output),
            box=box,
            dtypes=dtypes,
            weights=weights,
            rank=order * (1 if load.is_product else 2) - _share(load, graph),
        )


def _share(load: Load, graph: Graph) -> float:
    """How much of the network's work this is, between 0 and 1."""
    total = sum(node.flops for node in graph.nodes) or 1
    work = load.flops if load.is_product else 16 * (load.reads + load.writes)
    return min(work / total, 0.999)


def _whole(node: Node, graph: Graph) -> tuple[Local, Box]:
    """All of it; by its rule where there is one, because padding goes another way then."""
    reads = tuple(Read(Box.whole(graph.shape(name))) for name in node.refs)
    return Local(reads, node.op, node.args), Box.whole(graph.shape(node.output))


def _cut(node: Node, graph: Graph, what: str, count: int) -> tuple[Local, Box] | None:
    if what == ROWS:
        return _fewer_rows(node, graph, count)
    return cut_channels(node, graph, what, count)


def cut_channels(node: Node, graph: Graph, what: str, count: int) -> tuple[Local, Box] | None:
    """One in ``count`` of a product's output or input channels; None where it has none to cut."""
    local, box = _whole(node, graph)
    shapes = [read.box.shape for read in local.reads]
    kind = node.op.split(".")[1]
    if kind not in ("conv2d", "conv_transpose2d", "linear") or prod(shapes[1]) < LARGE_WEIGHTS:
        return None
    if kind != "linear" and node.args[6] != 1:
        return _fewer_groups(local, box, count) if kind == "conv2d" and what == OUTPUTS else None
    channels = 1 if kind == "linear" else 3
    made, summed = (1, 0) if kind == "conv_transpose2d" else (0, 1)
    if what == OUTPUTS:
        size = max(1, shapes[1][made] // count)
        reads = [shapes[0], _with(shapes[1], made, size), *((size,) for _ in shapes[2:])]
        return _resized(local, reads), _box(_with(box.shape, -channels, size))
    size = max(1, shapes[1][summed] // count)
    reads = [_with(shapes[0], -channels, size), _with(shapes[1], summed, size), *shapes[2:]]
    return _resized(local, reads), box


def _fewer_groups(local: Local, box: Box, count: int) -> tuple[Local, Box] | None:
    """A depthwise convolution on some of its channels."""
    shapes = [read.box.shape for read in local.reads]
    groups = local.args[6]
    if shapes[1][1] != 1 or shapes[1][0] != groups:
        return None
    size = max(1, shapes[1][0] // count)
    reads = [_with(shapes[0], -3, size), _with(shapes[1], 0, size), *((size,) for _ in shapes[2:])]
    fewer = replace(local, args=(*local.args[:6], size, *local.args[7:]))
    return _resized(fewer, reads), _box(_with(box.shape, -3, size))


def _fewer_rows(node: Node, graph: Graph, count: int) -> tuple[Local, Box] | None:
    """A box of about one in ``count`` positions: first fewer samples, then a tile in the middle."""
    shape, rule = graph.shape(node.output), rule_for(node.op)
    if node.op == "terrazzo.moments":
        whole = Box.whole(graph.shape(node.refs[0]))
        part = _tile(whole.shape, count)
        return Local((Read(part),), node.op, node.args), Box.whole(shape)
    if rule is None or rule.local is None or len(shape) < 3 or prod(shape) <= count:
        return None
    box = _tile(shape, count)
    return rule.local(node, graph, box), box


def _tile(shape: Sequence[int], count: int) -> Box:
    samples = prod(shape[:-3])
    if len(shape) == 4 and samples > 1:
        fewer = max(1, samples // count)
        shape = (fewer, *shape[1:])
        count = max(1, round(count * fewer / samples))
    high, wide = _grid(count, shape[-2], shape[-1])
    spans = [(0, extent) for extent in shape[:-2]]
    for extent, parts in ((shape[-2], high), (shape[-1], wide)):
        size = ceil(extent / parts)
        low = min(parts // 2 * size, extent - size)
        spans.append((low, low + size))
    return Box(tuple(spans))


def _grid(count: int, high: int, wide: int) -> tuple[int, int]:
    """Rows and columns of tiles: strips for two, else as square as it goes."""
    if count <= 2:
        return min(count, high), 1
    columns = max(part for part in range(1, count + 1) if count % part == 0 and part**2 <= count)
    return min(count // columns, high), min(columns, wide)


def _resized(local: Local, shapes: Sequence[tuple[int, ...]]) -> Local:
    reads = tuple(
        replace(read, box=Box.whole(shape)) for read, shape in zip(local.reads, shapes, strict=True)
    )
    return replace(local, reads=reads)


def _box(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    resized = list(shape)
    resized[dim] = size
    return tuple(resized)

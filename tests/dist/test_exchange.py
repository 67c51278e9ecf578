"""What crosses devices, step by step: the adjoint test, the right numbers, and every byte counted.

The adjoint test <Fx, y> = <x, F'y> alone would pass when a transfer is missing both ways, so each
step is also compared with what it must give.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from devices import run_on
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.geometry import Box, grid, transfers
from terrazzo.graph.export import frozen_in
from terrazzo.graph.rules import rule_for
from terrazzo.planner.cost import predict
from terrazzo.planner.guess import Figures, guessed
from terrazzo.planner.prices import Prices
from terrazzo.records import Graph, Group, Layout, Node, Plan, Ref, Value
from terrazzo.runtime.gradients import Buckets
from terrazzo.runtime.links import Links, connect
from terrazzo.runtime.steps import CombineStep, ExchangeStep, SpreadStep, TakeStep
from terrazzo.runtime.steps.step import Given, Run
from terrazzo.schedule import Array, Combine, Exchange, Move, Program, Spread, Take, traffic
from terrazzo.schedule.gradient import differentiable
from terrazzo.schedule.training import Training

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from blocks import SqueezeExcite

Shape = tuple[int, ...]
Boxes = tuple[Box, ...]


# ---- the smallest program around one step -----------------------------------------------------


def program(values: Mapping[str, Shape], arrays: Sequence[Array], *nodes: Node) -> Program:
    graph = Graph(
        values={n: Value(n, "node", shape, "float64") for n, shape in values.items()},
        nodes=nodes,
        inputs=(),
        outputs=(),
        mutations={},
    )
    devices = connect().devices
    plan = Plan("", devices, (Group("", Layout()),))
    return Program(graph, plan, {array.name: array for array in arrays}, (), {}, {}, {})


def call(made: Program, given: Mapping[str, Given] | None = None) -> Run:
    """A call in which every array carries a gradient and is reached."""
    names = frozenset(made.arrays)
    links = connect()
    run = Run(
        program=made,
        links=links,
        dtypes=dict.fromkeys(made.graph.values, torch.float64),
        carriers=names,
        given=given or {},
        seed=0,
        step=0,
        torch_device=torch.device("cpu"),
    )
    run.live, run.buckets = names, Buckets(links, {})
    return run


def total(links: Links, number: Tensor) -> float:
    return float(links.sum(number.detach().clone().reshape(1)))


def equal(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-12 * max(abs(one), abs(other), 1.0)


def whole_tensor(draw: random.Random, shape: Shape) -> Tensor:
    """The same on all devices, which share the draw."""
    seeded = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randn(shape, generator=seeded, dtype=torch.float64)


def own_tensor(draw: random.Random, shape: Shape, device: int) -> Tensor:
    """Different on every device."""
    return whole_tensor(random.Random(draw.randrange(1 << 30) + device), shape)


def random_box(draw: random.Random, shape: Shape) -> Box:
    """Any box, now and then an empty one."""
    spans = [sorted(draw.choices(range(extent + 1), k=2)) for extent in shape]
    return Box(tuple((low, high) for low, high in spans))


def random_layout(draw: random.Random, shape: Shape, devices: int) -> Boxes:
    """A disjoint cover by tiles of random shares."""
    rows = draw.choice([n for n in range(1, devices + 1) if devices % n == 0])
    shares = [[draw.randint(0, 3) for _ in range(n)] for n in (rows, devices // rows)]
    shares = [part if any(part) else [1] * len(part) for part in shares]
    return grid(shape, [(len(shape) - 2, shares[0]), (len(shape) - 1, shares[1])])


def random_shape(draw: random.Random) -> Shape:
    return tuple(draw.randint(1, 9) for _ in range(draw.randint(2, 4)))


# ---- the steps --------------------------------------------------------------------------------


def exchange(seed: int) -> str:
    """Several moves in one exchange, from arrays that hold more than they own."""
    draw, links = random.Random(seed), connect()
    shapes = {f"v{i}": random_shape(draw) for i in range(draw.randint(1, 3))}
    arrays, moves = [], []
    for name, shape in shapes.items():
        owned = random_layout(draw, shape, links.devices)
        held = tuple(box.hull(random_box(draw, shape)) for box in owned)
        needed = tuple(random_box(draw, shape) for _ in owned)
        arrays += [Array(name, name, held), Array(f"{name}@", name, needed)]
        moves.append(Move(name, f"{name}@", transfers(owned, needed)))
    made = program(shapes, arrays)
    run = call(made)
    step = ExchangeStep(Exchange(tuple(moves), 0), made, device=links.device)
    wholes = {name: whole_tensor(draw, shape) for name, shape in shapes.items()}
    run.held.update({name: wholes[name][run.box(name).slices()].clone() for name in shapes})
    step.forward(run)
    for name in shapes:
        if not torch.equal(run.held[f"{name}@"], wholes[name][run.box(f"{name}@").slices()]):
            return f"seed {seed}: {name} did not arrive"
    x = {name: own_tensor(draw, run.box(name).shape, links.device) for name in shapes}
    y = {f"{n}@": own_tensor(draw, run.box(f"{n}@").shape, links.device) for n in shapes}
    run.held.update(x)
    step.forward(run)
    run.grads.update(y)
    step.backward(run)
    here = sum((run.held[name] * y[name]).sum() for name in y)
    back = sum((x[name] * run.grads[name]).sum() for name in x)
    one, other = total(links, torch.as_tensor(here)), total(links, torch.as_tensor(back))
    return "" if equal(one, other) else f"seed {seed}: {one} against {other}"


def addends(seed: int) -> str:
    """Parts of a sum on several devices, added up where they are needed."""
    draw, links = random.Random(seed), connect()
    shape = random_shape(draw)
    parts, needed = (tuple(random_box(draw, shape) for _ in range(links.devices)) for _ in "ab")
    made = program({"v": shape}, [Array("v+", "v", parts), Array("v", "v", needed)])
    move = Move("v+", "v", transfers(parts, needed), adds=True)
    step = ExchangeStep(Exchange((move,), 0), made, device=links.device)
    run, y = call(made), own_tensor(draw, needed[links.device].shape, links.device)
    pieces = [own_tensor(draw, box.shape, device) for device, box in enumerate(parts)]
    run.held["v+"] = pieces[links.device].clone()
    step.forward(run)
    whole = torch.zeros(shape, dtype=torch.float64)
    for box, piece in zip(parts, pieces, strict=True):
        whole[box.slices()] += piece
    if not torch.allclose(run.held["v"], whole[run.box("v").slices()], rtol=1e-12):
        return f"seed {seed}: wrong sum"
    run.grads["v"] = y.clone()
    step.backward(run)
    here = total(links, (run.held["v"] * y).sum())
    back = total(links, (pieces[links.device] * run.grads["v+"]).sum())
    return "" if equal(here, back) else f"seed {seed}: wrong adjoint"


def gather(seed: int) -> str:
    """To a whole array: its gradient is complete everywhere, and each takes what it owns."""
    draw, links = random.Random(seed), connect()
    shape = random_shape(draw)
    owned = random_layout(draw, shape, links.devices)
    made = program({"v": shape}, [Array("v", "v", owned), Array("v*", "v", None)])
    everywhere = (Box.whole(shape),) * links.devices
    move = Move("v", "v*", transfers(owned, everywhere))
    step = ExchangeStep(Exchange((move,), 0), made, device=links.device)
    run, x, y = call(made), whole_tensor(draw, shape), whole_tensor(draw, shape)
    run.held["v"] = x[run.box("v").slices()].clone()
    step.forward(run)
    if not torch.equal(run.held["v*"], x):
        return f"seed {seed}: did not arrive"
    run.grads["v*"] = y.clone()
    step.backward(run)
    back = total(links, (run.held["v"] * run.grads["v"]).sum())
    return "" if equal(float((x * y).sum()), back) else f"seed {seed}: wrong adjoint"


def spread(seed: int) -> str:
    """A whole array used by parts, as a value in the middle and as a parameter."""
    draw, links = random.Random(seed), connect()
    shape = random_shape(draw)
    made = program({"v": shape}, [Array("v", "v", None), Array("v~", "v", None)])
    for parameter in (False, True):
        step = SpreadStep(Spread("v", "v~"), parameter=parameter)
        run, x = call(made), whole_tensor(draw, shape)
        y = own_tensor(draw, shape, links.device)
        run.held["v"], run.grads["v~"] = x, y.clone()
        step.forward(run)
        here = total(links, (run.held["v~"] * y).sum())
        step.backward(run)
        assert run.buckets is not None
        found = run.buckets.finish()["v"] if parameter else run.grads["v"]
        if not equal(here, float((x * found).sum())):
            return f"seed {seed}: wrong adjoint, parameter {parameter}"
    return ""


def take(seed: int) -> str:
    """Boxes of an input, overlapping and empty ones; given whole, or only a part of it."""
    draw, links = random.Random(seed), connect()
    shape = random_shape(draw)
    boxes = tuple(random_box(draw, shape) for _ in range(links.devices))
    made = program({"v": shape}, [Array("v", "v", None), Array("v@", "v", boxes)])
    x = whole_tensor(draw, shape)
    hold = boxes[links.device].hull(random_box(draw, shape))
    for held in (Box.whole(shape), hold):
        run, step = call(made, {"v": Given(x[held.slices()], held)}), TakeStep(Take("v", "v@"))
        step.forward(run)
        y = own_tensor(draw, run.box("v@").shape, links.device)
        here = total(links, (run.held["v@"] * y).sum())
        run.grads["v@"] = y.clone()
        step.backward(run)
        found = links.sum(run.input_parts["v"].clone())
        if not equal(here, float((x * found).sum())):
            return f"seed {seed}: wrong adjoint when given {held}"
    return ""


def combine(seed: int) -> str:
    """Reductions of owned parts against autograd on the whole, ties included."""
    draw, links = random.Random(seed), connect()
    shape = (2, 3, draw.randint(1, 9), draw.randint(1, 9))
    owned = random_layout(draw, shape, links.devices)
    nodes: list[tuple[str, tuple[object, ...], Shape]] = [
        ("aten.sum.dim_IntList", ((2, 3), False, None), shape[:2]),
        ("aten.mean.dim", ((3,), True, None), (*shape[:3], 1)),
        ("aten.amax.default", ((2, 3), True), (2, 3, 1, 1)),
        ("aten.amin.default", ((2,), False), (2, 3, shape[3])),
        ("terrazzo.adaptive_max_pool2d", ((1, 1),), (2, 3, 1, 1)),
    ]
    for op, args, result in nodes:
        node = Node(op, (Ref("v"), *args), ("r",))  # type: ignore[arg-type]
        made = program(
            {"v": shape, "r": result}, [Array("v", "v", owned), Array("r", "r", None)], node
        )
        wrong = combined(made, node, owned, draw)
        if wrong:
            return f"seed {seed}: {op} {wrong}"
    return ""


def combined(made: Program, node: Node, owned: Boxes, draw: random.Random) -> str:
    links, rule = connect(), rule_for(node.op)
    assert rule is not None and rule.reduce is not None
    reduction = rule.reduce(node, made.graph)
    nowhere = Box.empty(len(reduction.shape))
    step = Combine(
        node=0,
        inputs=("v",),
        target="r",
        parts=tuple(None if box.is_empty else reduction.partial(box) for box in owned),
        places=tuple(nowhere if box.is_empty else reduction.keeps(box) for box in owned),
        reduction=reduction,
        group=0,
    )
    x = (whole_tensor(draw, made.graph.shape("v")) * 2).round() / 2  # so that extremes tie
    x.requires_grad_()
    y = whole_tensor(draw, made.graph.shape("r"))
    run, ready = call(made), CombineStep(0, step, made, device=links.device)
    run.held["v"] = x.detach()[run.box("v").slices()].clone()
    ready.forward(run)
    expected = plain(node, x)
    if not torch.allclose(run.held["r"], expected, rtol=1e-13, atol=1e-13):
        return "is wrong"
    run.grads["r"] = y.clone()
    ready.backward(run)
    (gradient,) = torch.autograd.grad(expected, x, y)
    here = run.grads.get("v", run.zeros("v"))
    close = torch.allclose(here, gradient[run.box("v").slices()], rtol=1e-12, atol=1e-12)
    return "" if close else "has a wrong gradient"


def plain(node: Node, x: Tensor) -> Tensor:
    """The same by plain torch."""
    dims = node.args[1]
    if node.op == "terrazzo.adaptive_max_pool2d":
        return nn.functional.adaptive_max_pool2d(x, 1)
    kind = node.op.split(".")[1]
    result: Tensor = getattr(torch, kind)(x, dims, keepdim=bool(node.args[2]))
    return result


STEPS = {
    "exchange": exchange, "addends": addends, "gather": gather, "spread": spread, "take": take,
    "combine": combine,
}  # fmt: skip


def steps(name: str, seeds: int) -> list[str]:
    return [wrong for seed in range(seeds) if (wrong := STEPS[name](seed))]


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", STEPS)
def test_adjoints(name: str, devices: int) -> None:
    for wrong in run_on(devices, steps, name, 25):
        assert not wrong, "\n".join(wrong[:5])


# ---- bytes ------------------------------------------------------------------------------------


class Talkative(nn.Module):
    """Something of each: halos, statistics, reductions, a whole island, a gather, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.excite = SqueezeExcite(6, linear=True)
        self.deep = nn.Sequential(
            nn.MaxPool2d(3, 2, 1), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 5, 1, 2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.deep(self.excite(self.stem(x)))
        peak = y.amax((2, 3), keepdim=True)
        return self.head(y.mean((2, 3))), (y - peak).square().mean(), y.flatten(2).softmax(-1)


def counted(layout: str, groups: str, double: bool, frozen: str) -> tuple[tuple[int, int], ...]:
    """Bytes sent and summed in one training step, as counted, as foretold and as planned with."""
    torch.manual_seed(3)
    kind = torch.float64 if double else torch.float32
    model, x = Talkative().to(kind), torch.randn(2, 3, 33, 35, dtype=kind)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    net = tz.parallelize(model, (x,), layout=layout, groups=groups, seed=0)
    before = (net.links.counters.sent_bytes, net.links.counters.summed_bytes)
    sum(result.sum() for result in net(x)).backward()
    after = (net.links.counters.sent_bytes, net.links.counters.summed_bytes)
    trained = {
        value.name
        for value in net.program.graph.values.values()
        if value.kind == "parameter" and model.get_parameter(value.target).requires_grad
    }
    carriers = differentiable(net.program, trained)
    foretold = traffic(net.program, carriers)
    training = Training(frozen=frozen_in(model))
    assert training.weights(net.program.graph) == trained
    alike = guessed([Figures("", 1e9, 1 << 30, 1e7)] * net.links.devices)
    planned = predict(net.program, Prices(alike, training=training), memory=False)
    device = net.links.device
    return (
        (after[0] - before[0], after[1] - before[1]),
        (foretold.sent_bytes[device], foretold.summed_bytes[device]),
        (planned.sent_bytes[device], planned.summed_bytes[device]),
    )


@pytest.mark.parametrize(
    ("devices", "layout", "groups"),
    [(2, "tiles:2x1", "each"), (3, "tiles:1x2,0,3", "one"), (4, "tiles:2x1,3", "each")],
)
@pytest.mark.parametrize(
    ("double", "frozen"), [(False, ""), (True, "stem"), (False, "deep"), (False, "head")]
)
def test_every_byte_is_foretold(
    devices: int, layout: str, groups: str, double: bool, frozen: str
) -> None:
    found = run_on(devices, counted, layout, groups, double, frozen)
    assert any(sent for (sent, _), *_ in found)
    for device, (seen, foretold, planned) in enumerate(found):
        assert seen == foretold == planned, f"device {device}: (sent, summed)"

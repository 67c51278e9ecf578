"""Changing plans in a run: weights, gradients and optimisers' state move; the numbers go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import run_on
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import Disagreement, PlanError, UsageError
from terrazzo.runtime.cut import CutParameter, CutTensor, plain

PLANS = {
    1: ["whole", "tiles:1x1", "whole"],
    2: ["tiles:2x1", "channels:2", "samples:2", "channels:1,3", "whole"],
    3: ["channels:1,2,1", "tiles:3x1", "channels:2,1,1", "samples:2,1,1", "channels:0,1,3"],
    4: ["samples:2+channels:2", "tiles:2x2", "channels:4", "samples:2+tiles:2x1", "whole",
        "channels:2+samples:2"],
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
}


def model() -> nn.Module:
    """No bias before a norm: its gradient is noise around zero, which Adam makes large."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.0), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def batch(step: int, side: int = 12) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(4, 3, side, side, dtype=torch.float64)


def gap(expected: dict[str, Tensor], state: dict[str, Tensor]) -> float:
    assert list(expected) == list(state)
    return max(
        float((right.double() - state[name].double()).norm() / (right.double().norm() + 1e-9))
        for name, right in expected.items()
    )


def trained(layouts: list[str], name: str) -> tuple[float, list[int], bool, bool]:
    """Two steps by each plan, and backward of one more before the change: gradients move too."""
    one, x = model(), batch(0)
    net = tz.parallelize(model(), (x,), layout=layouts[0], groups="each", seed=0)
    objects = [id(p) for p in net.parameters()]
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (one, net)]
    cut, losses, graphs = [len(net.homes)], [[], []], []
    for turn, layout in enumerate([*layouts[1:], layouts[0]]):
        for each, optimizer, kept in zip((one, net), optimizers, losses, strict=True):
            for step in range(2):
                loss = each(batch(10 * turn + step)).square().mean()
                graphs.append(loss)  # with accumulators for gradients of the old shapes
                kept.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            each(batch(10 * turn + 2)).square().mean().backward()
        plan = tz.plan(net, (x,), layout=layout, groups=2 if turn % 2 else "each")
        net.change_plan(plan, optimizers[1])
        cut.append(len(net.homes))
        same_plan = net.plan == plan
        for each, optimizer in zip((one, net), optimizers, strict=True):
            each(batch(10 * turn + 3)).square().mean().backward()  # on top of what there was
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    far = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    far = max(far, gap(one.state_dict(), net.state_dict()))
    same = objects == [id(p) for p in net.parameters()]
    return far, cut, same, same_plan


@pytest.mark.parametrize(
    ("name", "devices"),
    [("momentum", 1), ("adam", 2), ("momentum", 3), ("adam", 3), ("adamw", 3), ("rmsprop", 3),
     ("adamw", 4)],
)  # fmt: skip
def test_training_goes_on_exactly(name: str, devices: int) -> None:
    for far, cut, same, same_plan in run_on(devices, trained, PLANS[devices], name):
        assert far < 1e-10
        assert same and same_plan
        assert devices == 1 or (0 in cut and max(cut) >= 6), cut


def whole(net: tz.Net, name: str, tensor: Tensor) -> Tensor:
    """What all devices hold of something with the shape of a weight."""
    return net.homes[name].gather(plain(tensor)) if name in net.homes else plain(tensor).clone()


def same_bits(layouts: list[str]) -> list[int]:
    """What moved is what cutting the whole again would give, bit for bit, on every device."""
    x, cut = batch(0), []
    net = tz.parallelize(model(), (x,), layout=layouts[0], groups="each", seed=0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for step, layout in enumerate([*layouts[1:], layouts[0]], start=1):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        before = {
            name: [whole(net, name, each) for each in kept(p, optimizer)]
            for name, p in net.named_parameters()
        }
        net.change_plan(tz.plan(net, (x,), layout=layout), optimizer)
        for name, p in net.named_parameters():
            home = net.homes.get(name)
            where = home.box.slices() if home else ...
            assert type(p) is (CutParameter if home else nn.Parameter)
            assert type(optimizer.state[p]["exp_avg"]) is (CutTensor if home else Tensor)
            for found, expected in zip(kept(p, optimizer), before[name], strict=True):
                assert torch.equal(plain(found), expected[where]), name
            assert float(optimizer.state[p]["step"]) == step
        cut.append(len(net.homes))
    return cut


def kept(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A weight and all that moves with it."""
    assert p.grad is not None
    return [p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


@pytest.mark.parametrize("devices", [3, 4])
def test_every_bit_arrives(devices: int) -> None:
    for cut in run_on(devices, same_bits, PLANS[devices]):
        assert 0 in cut and max(cut) >= 6, cut


def sizes_and_modes() -> float:
    """Graphs that were met before the change are met again after it, and new ones too."""
    one, net = model(), tz.parallelize(model(), (batch(0),), layout="channels:3", seed=0)
    far = []
    for layout in ("tiles:3x1", "channels:1,1,2"):
        for side in (12, 9):
            for training in (True, False):
                for each in (one, net):
                    each.train(training)
                outputs = [each(batch(side, side)).detach() for each in (one, net)]
                far.append(float((outputs[0] - outputs[1]).norm() / outputs[0].norm()))
        for each in (one, net):
            each.train()
        net.change_plan(tz.plan(net, (batch(0),), layout=layout))
        x, _ = next(iter(tz.feed([(batch(7), torch.zeros(4))], net)))
        outputs = [each(b).detach() for each, b in ((one, batch(7)), (net, x))]
        far.append(float((outputs[0] - outputs[1]).norm() / outputs[0].norm()))
    return max(far)


def test_other_sizes_modes_and_fed_batches_follow() -> None:
    assert max(run_on(3, sizes_and_modes)) < 1e-10


def frozen_and_passes() -> float:
    """A frozen layer moves without state; a plan with passes keeps less and gives the same."""
    one, net = model(), tz.parallelize(model(), (batch(0),), layout="channels:2", seed=0)
    for each in (one, net):
        each.get_parameter("3.weight").requires_grad_(False)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (one, net)]
    for step, wishes in enumerate(({"layout": "tiles:2x1", "passes": 2}, {"layout": "channels:2"})):
        for each, optimizer in zip((one, net), optimizers, strict=True):
            each(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.change_plan(tz.plan(net, (batch(0),), **wishes), optimizers[1])
    for each, optimizer in zip((one, net), optimizers, strict=True):
        each(batch(7)).square().mean().backward()
        optimizer.step()
    assert not net.get_parameter("3.weight").requires_grad
    assert net.get_parameter("3.weight") not in optimizers[1].state
    return gap(one.state_dict(), net.state_dict())


def test_frozen_layers_and_passes() -> None:
    assert max(run_on(2, frozen_and_passes)) < 1e-10


def other_plans() -> list[str]:
    """What is refused, by all devices, with the net as it was."""
    device = torch.distributed.get_rank()
    x = batch(0)
    net = tz.parallelize(model(), (x,), layout="channels:2", seed=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    tiles = tz.plan(net, (x,), layout="tiles:2x1")
    stranger = tz.plan(nn.Conv2d(3, 4, 3).double(), (x,), layout="tiles:2x1")
    three = tz.plan(net, (x,), devices=3, layout="tiles:3x1")
    told = []

    def refused(kind: type[Exception], plan: tz.Plan) -> None:
        with pytest.raises(kind) as failure:
            net.change_plan(plan, optimizer)
        told.append(str(failure.value))
        assert len(net.homes) >= 6

    out = net(x)
    refused(UsageError, tiles)
    out.square().mean().backward()
    optimizer.step()
    samples = tz.plan(net, (x,), layout="samples:2")
    refused(Disagreement, tiles if device else samples)
    refused(PlanError, stranger)
    refused(PlanError, three)
    weight = net.get_parameter("0.weight")
    kept = optimizer.state[weight].get("momentum_buffer")
    optimizer.state[weight]["rows"] = torch.zeros(3)
    refused(UsageError, tiles)
    del optimizer.state[weight]["rows"]
    if device:
        del optimizer.state[weight]["momentum_buffer"]
    refused(UsageError, tiles)
    optimizer.state[weight]["momentum_buffer"] = kept
    net.change_plan(tiles, optimizer)
    net(x).square().mean().backward()
    optimizer.step()
    return told


def test_what_cannot_be_changed_is_refused_by_all() -> None:
    for told in run_on(2, other_plans):
        waiting, differs, stranger, three, rows, lacks = told
        assert "call 1 of net waits for its backward pass" in waiting
        assert "changing to plan" in differs and "samples:2" in differs
        assert "the plan was made for model" in stranger
        assert "the plan is for 3 devices, 2 are here" in three
        assert "tensor of shape [3] as 'rows' for 0.weight" in rows
        assert "device 1 keeps gradient for 0.weight, device 0 gradient, momentum_buffer" in lacks


def left_behind(foreach: bool) -> str:
    x = batch(0)
    net = tz.parallelize(model(), (x,), layout="channels:1,3", seed=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=foreach)
    net(x).square().mean().backward()
    optimizer.step()
    net.change_plan(tz.plan(net, (x,), layout="channels:3,1"))  # without its optimiser
    net(x).square().mean().backward()
    with pytest.raises((UsageError, RuntimeError)) as failure:
        optimizer.step()
    return str(failure.value)


@pytest.mark.parametrize("foreach", [False, True])
def test_state_that_was_left_behind_is_found_out(foreach: bool) -> None:
    for told in run_on(2, left_behind, foreach):
        assert "name every optimiser in net.change_plan(plan, optimizer)" in told

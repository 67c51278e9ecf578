"""Whole training runs: weights and running statistics end where plain PyTorch ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, gradients, state, train, twin
from torch import Tensor, nn

import terrazzo as tz

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.05),
}
STEPS = 50


def fifty_steps(kind: str, layout: str, groups: str) -> str:
    """Device 0 compares with plain PyTorch; that all hold the same bits is compared outside."""
    plain = cnn(bias=kind == "sgd")
    net = tz.parallelize(twin(plain), (batches(1)[0][0],), layout=layout, groups=groups)
    data = batches(STEPS)
    losses = train(net, OPTIMIZERS[kind](net.parameters()), data)
    assert net.realigned == 0, "like hardware has nothing to align"
    if net.links.device == 0:
        start = state(plain)
        expected = train(plain, OPTIMIZERS[kind](plain.parameters()), data)
        assert losses == pytest.approx(expected, rel=1e-10)
        assert_close(state(net), state(plain))
        moved = (state(net)["norm1.running_var"] - start["norm1.running_var"]).norm()
        assert moved > 0.1, "the running statistics must have moved, or nothing was compared"
    return bits(net)


@pytest.mark.parametrize(
    ("kind", "devices", "layout", "groups"),
    [
        ("sgd", 2, "tiles:1x2", "one"),
        ("adamw", 3, "tiles:4,1,2x1", "each"),
        ("sgd", 4, "tiles:2x2", "2"),
    ],
)
def test_fifty_steps_end_where_plain_pytorch_ends(
    kind: str, devices: int, layout: str, groups: str
) -> None:
    found = run_on(devices, fifty_steps, kind, layout, groups)
    assert len(set(found)) == 1, "the weights must be the same bits on all devices"


def one_float32_step() -> None:
    plain = cnn(dtype=torch.float32, bias=False)
    ((x, y),) = batches(1, dtype=torch.float32)
    net = tz.parallelize(twin(plain), (x,))
    for model in (plain, net):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert_close(gradients(net), gradients(plain), limit=1e-5)
    assert_close(state(net), state(plain), limit=1e-5)


@pytest.mark.parametrize("devices", [2, 3])
def test_one_step_in_float32(devices: int) -> None:
    run_on(devices, one_float32_step)


def short_float32_run() -> str:
    data = batches(8, dtype=torch.float32)
    net = tz.parallelize(cnn(dtype=torch.float32), (data[0][0],), groups="2", seed=3)
    train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
    return bits(net)


def test_same_bits_on_all_devices_and_from_run_to_run() -> None:
    first = run_on(3, short_float32_run)
    second = run_on(3, short_float32_run)
    assert len({*first, *second}) == 1


# ---- around the optimiser -----------------------------------------------------------------------

ZOO: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def pair(model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """A plain model and a net with the same weights."""
    model = cnn() if model is None else model
    return twin(model), tz.parallelize(model, (batches(1)[0][0],))


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x, y = batches(step + 1)[step]
    return F.cross_entropy(model(x), y)


def optimizers() -> None:
    for kind, make in ZOO.items():
        models = pair(cnn(bias=False))
        for model in models:
            train(model, make(model.parameters()), batches(4))
        with named(kind):
            assert_close(state(models[1]), state(models[0]))


@contextlib.contextmanager
def named(case: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def several_optimizers_and_schedulers() -> None:
    models = pair()
    for model in models:
        first = torch.optim.SGD([*model.conv1.parameters(), *model.conv2.parameters()], 0.1)
        second = torch.optim.RMSprop(
            [{"params": [model.head.weight]}, {"params": [model.head.bias], "lr": 0.02}], lr=0.005
        )
        warm = torch.optim.lr_scheduler.LinearLR(first, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(second, 6)
        for step in range(6):
            loss = loss_of(model, step)
            loss.backward()
            for part in (first, second):
                part.step()
                part.zero_grad()
            warm.step()
            cosine.step()
    assert_close(state(models[1]), state(models[0]))


def averaged_weights() -> None:
    """An average of the model, and one of the net: both are plain models."""
    models = pair()
    averages = [
        torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
        )
        for model in models
    ]
    for model, average in zip(models, averages, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        update = partial(average.update_parameters, model)
        train(model, optimizer, batches(5), after=lambda _, update=update: update())
    assert_close(state(averages[1]), state(averages[0]))
    x = batches(1)[0][0]
    plain, found = (average.eval()(x) for average in averages)
    assert_close({"y": found}, {"y": plain})


def penalised_weights_elsewhere() -> None:
    """A weight used in a tiled layer and whole, at the same time."""
    models = pair(Tied())
    for model in models:
        loss_of(model).backward()
    assert_close(gradients(models[1]), gradients(models[0]))


class Tied(nn.Module):
    """One weight in two convolutions, and again in the classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(36, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.two(torch.relu(self.one(self.norm(self.stem(x))))))
        pooled = x.mean((2, 3)) @ self.one.weight.flatten(1)
        return self.head(pooled)


@pytest.mark.parametrize(
    "scene",
    [
        optimizers, several_optimizers_and_schedulers, averaged_weights,
        penalised_weights_elsewhere,
    ],
)  # fmt: skip
def test_optimisers_as_in_plain_pytorch(scene: Callable[[], None]) -> None:
    run_on(2, scene)


# ---- mixed arithmetic: the last device rounds differently ---------------------------------------


def arithmetic() -> str:
    return torch.backends.cpu.get_cpu_capability()


def rounding() -> bytes:
    """One optimiser step from equal weights and equal gradients."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(999))
    weight.grad = torch.randn(999)
    optimizer = torch.optim.SGD([weight], lr=0.1234, momentum=0.9, weight_decay=1e-3)
    optimizer.step()
    optimizer.step()
    return weight.detach().numpy().tobytes()


@pytest.fixture(scope="module")
def needs_mixed_arithmetic() -> None:
    """Says so where this processor has only one arithmetic to offer."""
    found = run_on(2, arithmetic, mixed=True)
    if found[0] == found[1]:
        pytest.skip(f"both devices compute with {found[0]}: nothing here can differ")


def mixed_float32(align_every: int) -> tuple[str, int, str, int]:
    data = batches(20, dtype=torch.float32)
    net = tz.parallelize(cnn(dtype=torch.float32), (data[0][0],), align_every=align_every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    train(net, optimizer, data)
    before, realigned = bits(net), net.realigned
    return before, realigned, bits_after_align(net), net.realigned


def bits_after_align(net: nn.Module) -> str:
    net.align()
    return bits(net)


@pytest.mark.usefixtures("needs_mixed_arithmetic")
def test_the_stand_in_for_mixed_hardware_rounds_differently() -> None:
    assert len(set(run_on(2, rounding, mixed=True))) == 2
    assert len(set(run_on(2, rounding))) == 1


@pytest.mark.usefixtures("needs_mixed_arithmetic")
def test_mixed_float32_run_drifts_and_align_mends_it() -> None:
    found = run_on(2, mixed_float32, 0, mixed=True)
    assert len({before for before, _, _, _ in found}) == 2, "no drift: nothing to align was tested"
    assert {unasked for _, unasked, _, _ in found} == {0}
    assert len({after for _, _, after, _ in found}) == 1
    assert {count for _, _, _, count in found} != {0}


@pytest.mark.usefixtures("needs_mixed_arithmetic")
def test_align_every_few_calls_keeps_weights_together() -> None:
    found = run_on(2, mixed_float32, 4, mixed=True)
    assert all(realigned > 0 for _, realigned, _, _ in found)
    assert len({after for _, _, after, _ in found}) == 1


def mixed_float64() -> str:
    data = batches(20)
    net = tz.parallelize(cnn(bias=False), (data[0][0],), align_every=5)
    plain = cnn(bias=False)
    plain.load_state_dict(net.state_dict())  # seeded weights differ where arithmetic does
    for model in (plain, net):
        train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), data)
    net.align()
    assert_close(state(net), state(plain))
    return bits(net)


@pytest.mark.usefixtures("needs_mixed_arithmetic")
def test_mixed_float64_run_equals_plain_pytorch() -> None:
    assert len(set(run_on(2, mixed_float64, mixed=True))) == 1

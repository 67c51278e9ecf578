"""Inputs of a wrong shape, numbers that are none, models that cannot be kept exact: all refused.

Every refusal is an error on every device, names what is wrong, and leaves nobody waiting: the
devices go on to train together afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from devices import run_on
from plain import batches, bits, cnn, twin
from refusal import refusal
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import ModelError, NotANumber, TerrazzoError

X, Y = batches(1)[0]


# ---- input of a wrong shape everywhere ----------------------------------------------------------


def wrong_inputs() -> list[str]:
    net = tz.parallelize(cnn(), (X,))
    before = bits(net)
    messages = [
        refusal(TerrazzoError, lambda: net(X[:, :2])),
        refusal(TerrazzoError, lambda: net(X.flatten(1))),
        refusal(TerrazzoError, lambda: net(X.float())),
        refusal(TerrazzoError, lambda: net()),
        refusal(TerrazzoError, lambda: net(X, X)),
        refusal(TerrazzoError, lambda: net("a picture")),
    ]
    assert bits(net) == before, "a refused call must change nothing"
    F.cross_entropy(net(X), Y).backward()
    return messages


def test_wrong_inputs_are_refused_as_the_model_would() -> None:
    words = ("channels", "conv2d", "type", "missing", "positional", "str")
    for messages in run_on(2, wrong_inputs):
        for message, word in zip(messages, words, strict=True):
            assert word in message


# ---- numbers that are none ----------------------------------------------------------------------


class Logarithm(nn.Module):
    """Gives NaN when a weight is negative, or a NaN gradient when it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = cnn()[:5]
        self.root = Root()
        self.tail = nn.Conv2d(8, 2, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.root(self.body(x))).mean((2, 3))


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 * torch.sqrt(self.level) + x


def nan_found() -> list[str]:
    model = Logarithm()
    net = tz.parallelize(model, (X,))
    bad = X.clone()
    bad[0, 0, 3, 3] = float("nan")
    before = bits(net)
    messages = [refusal(NotANumber, lambda: net(bad))]
    with torch.no_grad():
        model.root.level[3] = -1
    messages.append(refusal(NotANumber, lambda: net(X)))
    with torch.no_grad():
        model.root.level[3] = 1
    assert bits(net) == before, "running statistics must not have moved"
    with torch.no_grad():
        model.root.level[3] = 0  # forward is fine: zero; backward is zero times infinity
    loss = net(X).sum()
    messages.append(refusal(NotANumber, loss.backward))
    assert all(p.grad is None for p in net.parameters()), "no gradient must be seen"
    loss = net(X).sum()
    messages.append(refusal(NotANumber, (loss * float("nan")).backward))
    return messages


def test_nan_is_named() -> None:
    words = ("batch", "root", "root.level", "NaN")
    for messages in run_on(2, nan_found):
        for message, word in zip(messages, words, strict=True):
            assert word in message


def nan_allowed() -> None:
    plain = cnn()
    net = tz.parallelize(twin(plain), (X,), nan="allow")
    bad = X.clone()
    bad[0, 0, 3, 3] = float("nan")
    for model in (plain, net):
        F.cross_entropy(model(bad), Y).backward()
    for (name, one), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.isnan(), other.grad.isnan()), name
        assert one.grad.isnan().any(), name
    assert net.norm1.running_mean.isnan().any()


def test_nan_passes_when_allowed() -> None:
    run_on(2, nan_allowed)


# ---- models that cannot be kept exact -----------------------------------------------------------


class Does(nn.Module):
    """A convolution, then whatever a function does."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = act
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


def masked(x: Tensor) -> Tensor:
    return x[x > 0].sum()


def branch_on_data(x: Tensor) -> Tensor:
    return x * 2 if float(x.sum()) > 0 else x


def branch_on_chance(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x + 1


def size_by_chance(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, random.choice([2, 3, 4]))


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(4)]


def drawn(x: Tensor) -> Tensor:
    return torch.normal(x, 1.0)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.conv(x)


def inexact() -> list[str]:
    cases = (masked, branch_on_data, branch_on_chance, size_by_chance, shuffled, drawn)
    models = [Does(case) for case in cases] + [Writes()]
    return [refusal(ModelError, lambda m=model: tz.parallelize(m, (X,))) for model in models]


def test_models_that_cannot_be_kept_exact_are_refused() -> None:
    words = (
        "depends on data", "cannot be exported", "random", "random", "randperm", "normal",
        "clone it first",
    )  # fmt: skip
    for messages in run_on(2, inexact):
        for message, word in zip(messages, words, strict=True):
            assert word in message, message

"""Devices that do not do the same are told so.

Every refusal is an error on every device, names what is wrong, and leaves nobody waiting: the
devices go on to train together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import batches, cnn, train
from refusal import refusal
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import Disagreement

X, Y = batches(1)[0]
OTHER = batches(2)[1][0]


def rank() -> int:
    return torch.distributed.get_rank()


def on_one(value: Any, usual: Any, *, device: int = 1) -> Any:
    return value if rank() == device else usual


def loss_of(net: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(net(x), y)


def wrong_shape_on_one(net: nn.Module) -> None:
    net(on_one(X[:2], X))


def wrong_rank_on_one(net: nn.Module) -> None:
    net(on_one(X[0], X))


def wrong_dtype_on_one(net: nn.Module) -> None:
    net(on_one(X.float(), X))


def other_batch_on_one(net: nn.Module) -> None:
    net(on_one(OTHER, X))


def other_order_on_one(net: nn.Module) -> None:
    net(on_one(X.flip(0), X))


def one_other_picture(net: nn.Module) -> None:
    net(on_one(torch.cat([X[:2], OTHER[:1]]), X))


def other_target_on_one(net: nn.Module) -> None:
    loss_of(net, X, on_one(Y.flip(0), Y)).backward()


def one_other_label(net: nn.Module) -> None:
    """With equal logits, gradients of all labels have the same sum and the same size."""
    with torch.no_grad():
        net.head.weight.zero_()
        net.head.bias.zero_()
    y = Y.clone()
    y[1] = (y[1] + 1) % 5
    loss_of(net, X, on_one(y, Y)).backward()


def other_loss_on_one(net: nn.Module) -> None:
    (loss_of(net) * on_one(1.01, 1.0)).backward()


def eval_on_one(net: nn.Module) -> None:
    net.train(rank() != 1)(X)


def one_layer_in_eval_on_one(net: nn.Module) -> None:
    net.norm1.train(rank() != 1)
    net(X)


def frozen_on_one(net: nn.Module) -> None:
    net.conv1.requires_grad_(rank() != 1)
    net(X)


def no_grad_on_one(net: nn.Module) -> None:
    with torch.set_grad_enabled(rank() != 1):
        net(X)


def input_gradient_on_one(net: nn.Module) -> None:
    loss_of(net, X.clone().requires_grad_(rank() == 1)).backward()


def autocast_on_one(net: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=rank() == 1):
        net(X)


def other_setting_on_one(net: nn.Module) -> None:
    net.norm1.eps = on_one(1e-3, 1e-5)
    net(X)


def backward_against_forward(net: nn.Module) -> None:
    loss = loss_of(net)
    loss.backward() if rank() == 1 else net(X)


def a_call_skipped(net: nn.Module) -> None:
    for step, (x, y) in enumerate(batches(3)):
        if (step, rank()) != (1, 1):
            loss_of(net, x, y).backward()


def agree_against_forward(net: nn.Module) -> None:
    tz.agree(1.0) if rank() == 1 else net(X)


def align_against_backward(net: nn.Module) -> None:
    loss = loss_of(net)
    net.align() if rank() == 1 else loss.backward()


def feed_against_forward(net: nn.Module) -> None:
    list(tz.feed([(X, Y)], net)) if rank() == 1 else net(X)


def backward_of_other_calls(net: nn.Module) -> None:
    losses = [loss_of(net), loss_of(net, OTHER)]
    losses[rank() == 1].backward()


def other_learning_rate(net: nn.Module) -> None:
    train(net, torch.optim.SGD(net.parameters(), on_one(0.11, 0.1)), batches(1))
    net.align()


def other_learning_rate_unaligned(net: nn.Module) -> None:
    train(net, torch.optim.SGD(net.parameters(), on_one(0.11, 0.1)), batches(5))


def other_weights_loaded(net: nn.Module) -> None:
    with torch.no_grad():
        net.conv2.weight.mul_(on_one(1.001, 1.0))
    net.align()


def other_counter(net: nn.Module) -> None:
    net.norm1.num_batches_tracked += 100 + rank()
    net.align()


DISAGREE: dict[Callable[[nn.Module], None], str] = {
    wrong_shape_on_one: "2x3x23x17",
    wrong_rank_on_one: "inputs 3x23x17",
    wrong_dtype_on_one: "float32",
    other_batch_on_one: "batches given to net differ",
    other_order_on_one: "batches given to net differ",
    one_other_picture: "batches given to net differ",
    other_target_on_one: "targets",
    one_other_label: "targets",
    other_loss_on_one: "loss",
    eval_on_one: "eval mode",
    one_layer_in_eval_on_one: "device 1",
    frozen_on_one: "8 of 10 parameters",
    no_grad_on_one: "gradients off",
    input_gradient_on_one: "device 1",
    autocast_on_one: "device 1",
    other_setting_on_one: "device 1",
    backward_against_forward: "backward of call 2",
    a_call_skipped: "differ",
    agree_against_forward: "tz.agree",
    align_against_backward: "comparing weights",
    feed_against_forward: "waiting for a batch",
    backward_of_other_calls: "backward of call 3",
    other_learning_rate: "learning rates",
    other_learning_rate_unaligned: "learning rate",
    other_weights_loaded: "conv2.weight on device 1",
    other_counter: "norm1.num_batches_tracked on device 1",
}


@cache
def one_net() -> nn.Module:
    return tz.parallelize(cnn(), (X,), layout="tiles:1x2")


def disagree(name: str) -> str:
    """The message; then the same net goes on, to see that nobody was left behind."""
    net = one_net()
    net.load_state_dict(cnn().state_dict())
    net.zero_grad()
    net.train().requires_grad_(True)
    net.norm1.eps = 1e-5
    net.calls = net.commits = 0  # a skipped call has been counted on one device only
    loss_of(net).backward()
    case = next(case for case in DISAGREE if case.__name__ == name)
    return refusal(Disagreement, lambda: case(net))


@pytest.mark.parametrize("case", list(DISAGREE), ids=lambda case: case.__name__)
def test_devices_that_disagree_are_told(case: Callable[[nn.Module], None]) -> None:
    for message in run_on(2, disagree, case.__name__):
        assert DISAGREE[case] in message


def different_models() -> list[str]:
    return [
        refusal(Disagreement, lambda: tz.parallelize(cnn(on_one(6, 5)), (X,))),
        refusal(Disagreement, lambda: tz.parallelize(cnn(), (X,), groups=on_one("one", "each"))),
        refusal(Disagreement, lambda: tz.parallelize(cnn(), (on_one(X[:2], X),))),
    ]


def test_devices_that_wrap_other_things_are_told() -> None:
    for messages in run_on(2, different_models):
        for message in messages:
            assert "device 0:" in message
            assert "device 1:" in message

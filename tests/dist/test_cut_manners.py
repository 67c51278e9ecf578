"""What scripts do with weights that they do not know to be cut: the same numbers, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from devices import run_on
from refusal import refusal
from test_cut_weights import LAYOUTS, batch, gap, model, spread
from torch import Tensor, nn

from terrazzo.errors import UsageError
from terrazzo.runtime.cut import CutTensor

Act = Callable[[nn.Module], Any]


def biases(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.dim() == 1]


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for step in range(count):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()


def mean_squares(net: nn.Module) -> None:
    """Adafactor divides norms by the square root of how many elements there are."""
    steps(net, torch.optim.Adafactor(biases(net), lr=0.1))


def decay_of_some(net: nn.Module) -> None:
    large = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": biases(net), "lr": 1e-3}]
    steps(net, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0))


def added_up(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(3):
            (net(batch(10 * step + part)).square().mean() / 3).backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()


def hooked(net: nn.Module) -> None:
    """Hooks see gradients of the whole."""
    net[0].weight.register_hook(lambda grad: grad / grad.norm())
    net[7].weight.register_hook(lambda grad: grad + 0.1 * net[7].weight.detach())
    steps(net, torch.optim.SGD(net.parameters(), 0.1))


def extremes_in_a_loss(net: nn.Module) -> float:
    penalty = sum((p.norm(float("inf")) - p.abs().min() for p in net.parameters()), torch.zeros(()))
    (net(batch(0)).square().mean() + 0.1 * penalty + net[0].weight.mean()).backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    return float(penalty)


def thawed(net: nn.Module) -> None:
    """A layer joins in the middle, and the size of pictures changes at every step."""
    net[7].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-2)
    for step in range(4):
        if step == 2:
            net[7].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[7].parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        net(batch(step, 12 + 2 * (step % 2))).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def averaged_by_hand(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        for name, p in net.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(average[name])


def scaled(net: nn.Module) -> float:
    """The gradient of one element overflows: all devices leave the step out."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(batch(step)).square().mean()).backward()
        if step == 1:
            overflow(net[0].weight)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def overflow(weight: Tensor) -> None:
    """In the first element of the whole, which one device holds."""
    is_here = not isinstance(weight, CutTensor) or weight.home.box.spans[0][0] == 0
    with torch._C.DisableTorchFunctionSubclass():
        if is_here and weight.numel():
            weight.grad.view(-1)[0] = float("inf")


def looked_at(net: nn.Module) -> list[float]:
    net(batch(0)).square().mean().backward()
    found: list[Any] = [sum(p.numel() for p in net.parameters())]
    for p in net.parameters():
        grad = p.grad
        found += [grad.norm(order) for order in (0, 1, 2, float("inf"), -float("inf"))]
        found += [grad.max(), grad.min(), grad.mean(), grad.abs().amax(), p.detach().amin()]
        found += [torch.isfinite(grad).all(), (grad > 0).all(), (grad > 0).any()]
    return [float(number) for number in found]


def of_nothing_and_of_no_number(net: nn.Module) -> list[float]:
    """The gradient of a norm of zeros is zero, and one NaN is the largest of all."""
    weight = net[0].weight
    with torch.no_grad():
        weight.zero_()
    weight.norm().backward()
    assert weight.grad is not None
    found = [float(weight.grad.abs().sum())]
    with torch.no_grad():
        weight.fill_(float("nan"))
    found += [float(weight.max().isnan()), float(weight.norm(float("inf")).isnan())]
    with torch.no_grad():
        weight.fill_(1.0)
    return found


SAME: tuple[Act, ...] = (
    mean_squares, decay_of_some, added_up, hooked, extremes_in_a_loss, thawed, averaged_by_hand,
    scaled, looked_at, of_nothing_and_of_no_number,
)  # fmt: skip


def acted(layout: str, name: str) -> tuple[float, Any, Any]:
    act = next(one for one in SAME if one.__name__ == name)
    one, net = spread(layout)
    expected, found = act(one), act(net)
    return gap(one, net.state_dict()), expected, found


@pytest.mark.parametrize("name", [act.__name__ for act in SAME])
def test_the_same_as_on_whole_weights(name: str) -> None:
    for far, expected, found in run_on(3, acted, LAYOUTS[3], name):
        assert far < 1e-10
        assert found == (
            None if expected is None else pytest.approx(expected, rel=1e-10, abs=1e-14)
        )


def test_devices_that_hold_the_same_part_speak_once() -> None:
    for name in ("looked_at", "extremes_in_a_loss", "scaled"):
        for far, expected, found in run_on(4, acted, LAYOUTS[4], name):
            assert far < 1e-10
            assert found == pytest.approx(expected, rel=1e-10, abs=1e-14)


def refused() -> list[str]:
    _, net = spread(LAYOUTS[2])
    weight, linear = net[0].weight, net[13].weight
    net(batch(0)).sum().backward()
    whole = {name: 0.5 * tensor for name, tensor in model().state_dict().items()}
    noise = torch.randn(weight.shape, dtype=torch.float64)
    attempts: Iterable[Callable[[], Any]] = (
        lambda: torch._foreach_powsum([weight.grad], 2),
        lambda: torch._foreach_mm([linear], [torch.ones(linear.shape[::-1]).double()]),
        lambda: weight.detach().add_(noise),
        lambda: torch._foreach_add_([weight.detach()], [noise]),
        lambda: setattr(weight, "data", torch.ones(8, 3, 3, 3).double()),
        lambda: weight.norm("nuc"),
        lambda: weight.amax(1),
        lambda: nn.init.kaiming_normal_(weight),
        lambda: torch.randn_like(weight),
        lambda: net.load_state_dict(whole, assign=True),
        lambda: net.float(),
        lambda: torch.optim.Muon([linear]).step(),
        lambda: torch.optim.LBFGS(net.parameters()).step(lambda: torch.zeros(())),
        lambda: torch.optim.Adafactor(net.parameters()).step(),
        lambda: state_of_whole(net).step(),
    )
    return [refusal(UsageError, attempt) for attempt in attempts]


def state_of_whole(net: nn.Module) -> torch.optim.Optimizer:
    """An optimiser with what another kept for whole weights."""
    one = model()
    trained = torch.optim.Adam(one.parameters())
    steps(one, trained, 1)
    loaded = torch.optim.Adam(net.parameters())
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    return loaded


def test_what_would_differ_is_refused() -> None:
    for told in run_on(2, refused):
        assert all("is cut over the devices" in text for text in told), told

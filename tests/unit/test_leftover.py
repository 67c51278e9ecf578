"""Gradients that no optimiser has used yet are known wherever a run goes on, and only they."""

from __future__ import annotations

import torch
from torch import nn

import terrazzo as tz


def made() -> tuple[tz.Run, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    net = tz.parallelize(nn.Conv2d(3, 4, 3).double(), (x,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return tz.Run(net, optimizer, loader=[x]), optimizer, x


def test_a_state_holds_what_is_not_used_yet() -> None:
    run, optimizer, x = made()
    run.net(x).sum().backward()
    assert run.state_dict()["unused"] == [1]
    optimizer.step()
    assert run.state_dict()["grads"] == {}, "it would be kept for nothing"
    run.net(x).square().sum().backward()
    state = run.state_dict()
    other, _, _ = made()
    other.load_state_dict(state)
    for name, parameter in run.net.named_parameters():
        assert torch.equal(other.net.get_parameter(name).grad, parameter.grad)
    assert other.state_dict()["unused"] == [1]


def test_who_goes_back_or_joins_knows_how_much_is_unused() -> None:
    """All devices must ask for cut gradients, or none."""
    run, optimizer, x = made()
    run.net(x).sum().backward()
    rest = run._rest(None)  # type: ignore[arg-type]
    optimizer.step()
    run.net(x).sum().backward()
    run.net(x).sum().backward()
    newcomer, _, _ = made()
    for one in (run, newcomer):
        one._load_rest(rest)
        assert one._leftover.unused == [1]

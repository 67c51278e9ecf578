"""Lean optimisers make torch's steps, and do not load its compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.optimizers import COMPILER, spare_compiler

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.1},
    "RMSprop": {"lr": 0.1},
    "LBFGS": {"lr": 0.5},
}


def trained(kind: type[Optimizer], options: dict[str, Any]) -> tuple[Tensor, Optimizer]:
    torch.manual_seed(0)
    weight = torch.randn(7, requires_grad=True)
    optimizer = kind([weight], **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (weight.cos() - 0.3).square().sum()
        value.backward()
        return value

    for _ in range(5):
        optimizer.step(loss)
    return weight, optimizer


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_and_the_same_state(name: str) -> None:
    kind, options = getattr(torch.optim, name), KINDS[name]
    plain, one = trained(kind, options)
    weight, other = trained(tz.lean(kind), options)
    assert torch.equal(weight, plain)
    assert isinstance(other, kind) and weight.is_leaf and weight.requires_grad
    mine, theirs = other.state_dict()["state"], one.state_dict()["state"]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    again = kind([weight], **options)
    again.load_state_dict(other.state_dict())
    assert again.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_hooks_see_steps() -> None:
    seen = []
    weight = torch.ones(2, requires_grad=True)
    optimizer = tz.lean(torch.optim.SGD)([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]
    assert tz.lean(torch.optim.SGD) is type(optimizer)


def test_what_is_not_torchs_own_stays() -> None:
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tz.lean(Own)([torch.ones(1, requires_grad=True)], lr=0.1).zero_grad()


SCRIPT = """
import sys, torch, terrazzo as tz
weight = torch.ones(3, requires_grad=True)
for kind in (torch.optim.SGD, torch.optim.Adam):
    optimizer = tz.lean(kind)([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules, "lean optimisers load the compiler"
torch.optim.SGD([weight], lr=0.1)
assert "torch._dynamo" in sys.modules, "torch has changed: lean is not needed any more"
"""


def test_the_compiler_stays_out() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SMALL = """
import sys, torch
from terrazzo.optimizers import spare_compiler
class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
spare_compiler()
for kind in (torch.optim.SGD, torch.optim.Adam, Own):
    weight = torch.ones(3, requires_grad=True)
    optimizer = kind([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 10.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))
assert "torch._dynamo" not in sys.modules, "optimisers of small devices load the compiler"
"""


def test_small_devices_do_without_the_compiler_by_themselves() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_the_compiler_is_loaded_nothing_is_changed() -> None:
    step = torch.optim.SGD.step
    assert COMPILER in sys.modules or torch.optim.SGD([torch.ones(1)], lr=0.1)
    spare_compiler()
    assert torch.optim.SGD.step is step

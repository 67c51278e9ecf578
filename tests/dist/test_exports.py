"""What tells kept exports apart: a test must never get the graph of another model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exports import description
from plain import cnn
from torch import Tensor, nn

X = torch.zeros(2, 3, 9, 9, dtype=torch.float64)


def test_other_weights_make_no_other_export() -> None:
    model = cnn()
    before = description(model, (X,), {})
    with torch.no_grad():
        model.conv1.weight.mul_(2)
    assert description(model, (X + 1,), {}) == before == description(cnn(), (X,), {}) != ""


def share(model: nn.Sequential) -> None:
    model.norm1.bias = model.norm1.weight


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "mode": lambda model: model.eval(),
    "mode of one layer": lambda model: model.norm1.eval(),
    "frozen": lambda model: model.conv1.weight.requires_grad_(False),
    "dtype": lambda model: model.float(),
    "setting": lambda model: setattr(model.norm1, "momentum", 0.5),
    "stride": lambda model: setattr(model.conv1, "stride", (1, 1)),
    "another layer": lambda model: model.add_module("act2", nn.Sigmoid()),
    "shared": share,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_an_export_is_seen(change: str) -> None:
    model = cnn()
    before = description(model, (X,), {})
    CHANGES[change](model)
    assert description(model, (X,), {}) not in ("", before)


def test_inputs_and_surroundings_are_seen() -> None:
    model = cnn()
    found = [description(model, (x,), {}) for x in (X, X[:1], X.float(), X.mT, X[:, :, :7])]
    found.append(description(model, (X,), {"scale": 2}))
    found.append(description(model, (X,), {"scale": 3}))
    with torch.autocast("cpu"):
        found.append(description(model, (X,), {}))
    with torch.no_grad():
        found.append(description(model, (X,), {}))
    assert "" not in found
    assert len(set(found)) == len(found)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_code_that_is_not_in_sight_is_not_kept() -> None:
    assert description(nn.Sequential(nn.ReLU(), Own()), (X,), {}) == ""
    hooked = cnn()
    hooked.conv1.register_forward_hook(lambda layer, args, result: result * 2)
    assert description(hooked, (X,), {}) == ""

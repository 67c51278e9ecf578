"""What an export would lose is refused, and told."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.errors import ModelError
from terrazzo.graph.export import export

sys.path.insert(0, str(Path(__file__).parent))
from does import Does, X, autocast_region


def masked(self: Any, x: Tensor) -> Tensor:
    return x[x > 0]


def branch_on_data(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def branch_on_chance(self: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else -x


def number_of_chance(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def name_of_chance(self: Any, x: Tensor) -> dict[str, Tensor]:
    return {random.choice(["left", "right"]): x}


def leaky_by_chance(self: Any, x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


def dropout_of_channels(self: Any, x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.5, True)[1]


def write_under_no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x[:, 1].clamp_(0, 1)
    return x * x


def write_through_detach(self: Any, x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x * x


def write_through_data(self: Any, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x * x


REFUSED: dict[Callable[..., Any], str] = {
    masked: "depends on data",
    branch_on_data: "cannot be exported",
    branch_on_chance: "Python's random numbers",
    number_of_chance: "Python's random numbers",
    name_of_chance: "Python's random numbers",
    leaky_by_chance: "rrelu",
    dropout_of_channels: "mask of a dropout",
    write_under_no_grad: "in place under no_grad",
    write_through_detach: "detached view",
    write_through_data: "cannot be exported",
}


@pytest.mark.parametrize("act", list(REFUSED), ids=lambda act: act.__name__)
def test_what_cannot_be_kept_exact_is_refused(act: Callable[..., Any]) -> None:
    with pytest.raises(ModelError) as refused:
        export(Does(act), (X,))
    assert REFUSED[act] in str(refused.value)


def test_a_region_of_its_own_autocast_is_refused_under_autocast() -> None:
    model = Does(autocast_region, layer=nn.Conv2d(4, 4, 1)).float()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="by itself"):
        export(model, (X.float(),))


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) * 2


class Trains(nn.Module):
    """Writes into its own weight during the forward call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return x * self.weight


def test_a_model_that_writes_into_its_input_or_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="writes into x"):
        export(Writes(), (X.clone(),))
    with pytest.raises(ModelError, match="writes into"):
        export(Trains(), (X,))


def test_wrong_arguments_are_told_as_the_model_tells_them() -> None:
    with pytest.raises(ModelError, match="channels"):
        export(nn.Conv2d(4, 4, 3).double(), (X,))
    with pytest.raises(ModelError, match="missing"):
        export(Does(lambda self, x, y: x), (X,))

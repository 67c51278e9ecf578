"""Part: what can be done with a piece of a batch, and what must be refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.runtime.part import Part

SHAPE = (2, 3, 8, 4)
BOX = Box(((0, 2), (0, 3), (2, 5), (0, 4)))
WHOLE = torch.arange(192, dtype=torch.uint8).view(SHAPE)
MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)


def part() -> Part:
    return Part(WHOLE[BOX.slices()], BOX, SHAPE)


def empty() -> Part:
    return Part(torch.empty(0, 0, 0, 0, dtype=torch.uint8), Box.empty(4), SHAPE)


def test_it_tells_of_the_whole() -> None:
    x = part()
    assert x.shape == x.size() == torch.Size(SHAPE)
    assert (x.size(0), x.size(-1), len(x), x.dim(), x.ndim) == (2, 4, 2, 4, 4)
    assert (x.numel(), x.dtype, x.device) == (192, torch.uint8, torch.device("cpu"))
    assert not x.is_floating_point()
    assert not x.requires_grad
    assert "2:5" in repr(x)
    example = x.example()
    assert example.shape == SHAPE
    assert example.dtype == torch.uint8


ALONE: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to dtype": lambda x: x.to(torch.float64),
    "to device": lambda x: x.to("cpu", torch.float32, non_blocking=True),
    "type": lambda x: x.type(torch.int32),
    "scaled": lambda x: x / 255,
    "by an array's number": lambda x: x * np.float32(0.5),
    "shifted": lambda x: 1 - (2 * x.float() + 3) * 0.5,
    "per channel": lambda x: (x.float() - MEAN) / MEAN,
    "per channel of rank 4": lambda x: x.double() * MEAN[None].double(),
    "per sample": lambda x: x + torch.tensor([1.0, 2.0]).view(2, 1, 1, 1),
    "channel first": lambda x: MEAN + x,
    "channel minus": lambda x: MEAN - x,
    "channel times": lambda x: MEAN * x,
    "number tensor": lambda x: torch.tensor(2.0) * x,
    "methods": lambda x: x.sub(1).mul(2).add(0.5).div(4),
}


@pytest.mark.parametrize("name", list(ALONE))
def test_elements_alone_are_as_in_the_whole(name: str) -> None:
    act = ALONE[name]
    found, expected = act(part()), act(WHOLE)
    assert isinstance(found, Part)
    assert found.dtype == expected.dtype
    assert torch.equal(found.tensor, expected[BOX.slices()])
    assert (found.box, found.shape) == (BOX, torch.Size(SHAPE))
    nothing = act(empty())
    assert nothing.dtype == expected.dtype, "an empty box has the same dtype as its peers"
    assert nothing.tensor.shape == (0, 0, 0, 0)


def augmented(x: Part) -> Part:
    x /= 2
    x -= 1
    return x


def test_augmented_assignment_makes_a_new_part() -> None:
    x = part()
    found = augmented(x)
    assert torch.equal(found.tensor, x.tensor / 2 - 1)
    assert x.dtype == torch.uint8


REFUSED: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "view": lambda x: x.view(2, -1),
    "flip": lambda x: x.flip(-1),
    "torch.mean": lambda x: torch.mean(x),
    "torch.stack": lambda x: torch.stack([x, x]),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "keyword": lambda x: torch.sum(input=x),
    "index": lambda x: x[0],
    "assign": lambda x: x.__setitem__(0, 1),
    "iterate": lambda x: list(x),
    "numpy": lambda x: np.asarray(x),
    "a mask": lambda x: x * torch.ones(8, 4),
    "rows": lambda x: x + torch.ones(8, 1),
    "a row of the part": lambda x: x + torch.ones(3, 4),
    "the whole": lambda x: x - WHOLE,
    "more dimensions": lambda x: x * torch.ones(5, 1, 1, 1, 1),
    "other channels": lambda x: x * torch.ones(5, 1, 1),
    "another part": lambda x: x + part(),
    "trained scale": lambda x: x * torch.ones(3, 1, 1, requires_grad=True),
    "trained number": lambda x: x * torch.ones((), requires_grad=True),
    "divided by": lambda x: MEAN / x,
    "a text": lambda x: x + "a",
    "a part of it added": lambda x: torch.ones(()).add(x, alpha=2),
    "a part of it taken away": lambda x: Tensor.sub(torch.ones(()), x, alpha=2),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("make", [part, empty])
def test_what_needs_the_rest_is_refused(name: str, make: Callable[[], Part]) -> None:
    with pytest.raises(UsageError, match="before the feed"):
        REFUSED[name](make())


def test_the_refusal_names_what_was_tried_and_what_is_here() -> None:
    with pytest.raises(UsageError, match=r"\.std would be wrong.*") as refused:
        part().std()
    assert "[0:2, 0:3, 2:5, 0:4] of [2, 3, 8, 4]" in str(refused.value)


def test_python_may_still_look_at_it() -> None:
    """Debuggers, copies and hasattr ask for special names; those are no mistakes of the user."""
    x = part()
    assert not hasattr(x, "__wrapped__")
    assert isinstance(copy.copy(x), Part)
    again = pickle.loads(pickle.dumps(x))
    assert torch.equal(again.tensor, x.tensor)
    assert not isinstance(x, Tensor)

"""Refused: what cannot be done with a part of a weight, and what can be done instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.errors import UsageError

if TYPE_CHECKING:
    from terrazzo.runtime.cut import Home


def story(home: Home) -> str:
    return f"the weight {home.name} is cut over the devices (here {home.box} of {list(home.shape)})"


def left_behind(home: Home) -> UsageError:
    return UsageError(
        f"{story(home)} since plans were changed, but something that belongs to it was left where "
        "it was before: name every optimiser in net.change_plan(plan, optimizer)"
    )


def stranger(home: Home, what: str, shape: Sequence[int]) -> UsageError:
    """Even one of the same shape, such as noise: who drew it did not draw it for the whole."""
    return UsageError(
        f"{story(home)}: {what} with a tensor of shape {list(shape)} that was not made from it "
        "would be wrong on a part. torch.zeros_like and arithmetic on the weight make tensors that "
        "belong to it; net.state_dict(), called on all devices, has the whole weights, and "
        'layout="tiles" cuts none.'
    )


def refusal(home: Home, what: str) -> UsageError:
    return UsageError(
        f"{story(home)}: {what} would be wrong on a part. Element-wise arithmetic, sums and norms "
        "work; net.state_dict(), called on all devices, has the whole weights."
    )

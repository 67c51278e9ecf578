"""Belongings: all that is kept for a weight beside itself: its gradient, and optimisers' state.

Whatever has the shape of a weight lives, moves and is copied as the weight does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import UsageError
from terrazzo.runtime.cut import Home, plain, settle, taken

GRADIENT = "gradient"
PART, SINGLE, VALUE = "part", "single", "value"

Entry = tuple[str, str, Any]
"""Part of a weight's shape, single number in a tensor, or plain value; its dtype; the number."""
Table = dict[str, Entry]


def entries(
    name: str, parameter: nn.Parameter, shape: Sequence[int], optimizers: Sequence[Optimizer]
) -> Table:
    """What this device keeps for a weight of some shape, of which it may hold a part."""
    found: Table = {}
    gradient = taken(parameter)
    if gradient is not None:
        found[GRADIENT] = (PART, _dtype(gradient), None)
    for number, optimizer in enumerate(optimizers):
        for key, value in optimizer.state.get(parameter, {}).items():
            entry = _entry(parameter, value)
            if entry is None:
                raise _refusal(name, parameter, shape=shape, key=str(key), value=value)
            found[f"{number} {key}"] = entry
    return found


def _entry(parameter: nn.Parameter, value: Any) -> Entry | None:
    if isinstance(value, Tensor):
        tensor = plain(value)
        if tensor.shape == plain(parameter).shape:
            return (PART, _dtype(tensor), None)
        if tensor.numel() == 1:
            return (SINGLE, _dtype(tensor), [list(tensor.shape), tensor.item()])
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return (VALUE, "", value)
    return None


def _refusal(
    name: str, parameter: nn.Parameter, *, shape: Sequence[int], key: str, value: Any
) -> UsageError:
    is_tensor = isinstance(value, Tensor)
    seen = f"tensor of shape {list(plain(value).shape)}" if is_tensor else f"{type(value).__name__}"
    return UsageError(
        f"the optimiser keeps a {seen} as {key!r} for {name} (here "
        f"{list(plain(parameter).shape)} of {list(shape)}): only what has the shape of a weight, "
        "or is one number, can move with it. Use SGD, Adam or another optimiser that works element "
        "by element, or keep the plan."
    )


def held(
    parameter: nn.Parameter, label: str, dtype: str, optimizers: Sequence[Optimizer]
) -> Tensor:
    """What this device holds of something that belongs to a weight; nothing, where it had none.

    Only a device without a part of the weight can lack it.
    """
    if label == GRADIENT:
        found = taken(parameter)
    else:
        number, _, key = label.partition(" ")
        value = optimizers[int(number)].state.get(parameter, {}).get(key)
        found = plain(value) if isinstance(value, Tensor) else None
    if found is None:
        weight = plain(parameter)
        return torch.empty(weight.shape, dtype=getattr(torch, dtype), device=weight.device)
    return found


def hand_over(
    parameter: nn.Parameter,
    home: Home | None,
    *,
    part: Tensor,
    table: Mapping[str, Entry],
    arrived: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    """Makes a parameter hold a part of its weight, with all that belongs to it."""
    settle(parameter, part, home, grad=arrived.get(GRADIENT))
    for number, optimizer in enumerate(optimizers):
        start = f"{number} "
        mine = {label: entry for label, entry in table.items() if label.startswith(start)}
        if not mine:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        before = dict(state)
        state.clear()
        for label, (kind, dtype, value) in mine.items():
            key = label.removeprefix(start)
            if kind == PART:
                tensor = arrived[label]
                state[key] = tensor if home is None else home.marked(tensor)
            elif kind == SINGLE:
                size, content = value
                known = before.get(key)  # some optimisers count on the accelerator
                where = known.device if isinstance(known, Tensor) else None
                state[key] = torch.full(size, content, dtype=getattr(torch, dtype), device=where)
            else:
                state[key] = value


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

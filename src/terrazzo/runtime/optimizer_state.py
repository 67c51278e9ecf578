"""An optimiser's state as one device would have it, also where weights are cut."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.runtime.cut import Home, plain
from terrazzo.runtime.links import Links


def whole_state(optimizer: Optimizer, links: Links) -> dict[str, Any]:
    """``state_dict()`` with whole tensors for cut weights; all devices call it at one time."""
    state: dict[str, Any] = optimizer.state_dict()
    for place, parameter, home in _cut(optimizer):
        own = state["state"].get(place, {})
        kept = {key: value for key, value in own.items() if _is_part(value, parameter)}
        found = dict(own)
        for key, dtype in _agreed(kept, links):
            part = plain(kept[key]) if key in kept else torch.empty(0, dtype=getattr(torch, dtype))
            found[key] = home.gather(part)
        if found:
            state["state"][place] = found
    return state


def load_whole(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The inverse: of what belongs to cut weights each device takes its part."""
    state = {**state, "state": dict(state["state"])}
    for place, _, home in _cut(optimizer):
        own = state["state"].get(place, {})
        state["state"][place] = {key: _part(value, home) for key, value in own.items()}
    optimizer.load_state_dict(state)


def _cut(optimizer: Optimizer) -> list[tuple[int, Tensor, Home]]:
    """The cut weights of an optimiser, by the numbers that its state goes by."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        (place, parameter, parameter.home)
        for place, parameter in enumerate(parameters)
        if getattr(parameter, "home", None) is not None
    ]


def _is_part(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == plain(parameter).shape


def _part(value: Any, home: Home) -> Any:
    is_whole = isinstance(value, Tensor) and value.shape == home.shape
    return home.marked(home.part(value)) if is_whole else value


def _agreed(kept: dict[str, Tensor], links: Links) -> list[tuple[str, str]]:
    """What any device keeps for a weight: one without a part of it may keep nothing."""
    mine = {key: str(value.dtype).removeprefix("torch.") for key, value in kept.items()}
    found: dict[str, str] = {}
    for text in links.gather_text(json.dumps(mine)):
        found |= json.loads(text)
    return sorted(found.items())

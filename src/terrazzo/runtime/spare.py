"""A spare: a run as it was between two steps, kept in memory for when a device is lost.

Of cut weights a device has parts that nobody else has. So every few steps each device puts aside
what it holds, and its neighbours keep a copy of its parts, with what belongs to them:

    device 0: [own 0] [copy of 2]   device 1: [own 1] [copy of 0]   device 2: [own 2] [copy of 1]

When device 1 is lost the others have all parts of that step, go back to it, and go on from there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.runtime.belongings import PART, Entry, Table, held
from terrazzo.runtime.cut import CutParameter, plain, settle, taken
from terrazzo.schedule.tiling import Boxes

WEIGHT = "weight"
ALIGNED_BYTES = 16
Row = tuple[str, str, str, list[int], int]
"""A tensor in a bundle: of which weight, what it is, dtype, shape, and where it begins."""
Key = tuple[int, int, int]
"""When a spare was made: the epoch of the members, steps, and which border of the data it was."""


@dataclass
class Bundle:
    """The tensors of some weights in one piece of memory, as they travel."""

    rows: list[Row]
    data: Tensor

    @classmethod
    def of(cls, tensors: Mapping[tuple[str, str], Tensor]) -> Bundle:
        rows: list[Row] = []
        end = 0
        for (name, label), tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((name, label, dtype, list(tensor.shape), end))
            end += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        bundle = cls.room(rows)
        for row, tensor in zip(rows, tensors.values(), strict=True):
            bundle._view(row).copy_(tensor)
        return bundle

    @classmethod
    def room(cls, rows: Sequence[Row]) -> Bundle:
        """For what another device sends."""
        end = _span(rows[-1])[1] if rows else 0
        return cls(list(rows), torch.empty(end, dtype=torch.uint8))

    def _view(self, row: Row) -> Tensor:
        begin, end = _span(row)
        return self.data[begin:end].view(getattr(torch, row[2])).view(row[3])

    def find(self, name: str, label: str) -> Tensor | None:
        """A tensor of it; None, where its device held none."""
        for row in self.rows:
            if row[0] == name and row[1] == label:
                return self._view(row)
        return None


def _span(row: Row) -> tuple[int, int]:
    """Where a tensor of a bundle begins and ends."""
    size: int = getattr(torch, row[2]).itemsize * prod(row[3])
    return row[4], row[4] + size


@dataclass
class Spare:
    """What one device keeps of a step."""

    key: Key
    commits: int
    members: tuple[int, ...]
    homes: dict[str, Boxes]
    """How weights were cut then, over those members."""
    tables: dict[str, Table]
    """What belonged to each of these."""
    wholes: dict[str, Any]
    """Weights that nobody cuts: each with its gradient and the state of every optimiser."""
    rest: Any
    """All that is no weight, as the run told it; None, where it was made in the middle of a step:
    all of that has stayed as it is."""
    bundles: dict[int, Bundle] = field(default_factory=dict)
    """Parts of cut weights, by the member whose they are: this device's and its neighbours'."""
    versions: tuple[Any, ...] = ()
    """Of cut weights and gradients, to know whether they have changed since."""


def named(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The weights of a model, and those that its optimisers have beside: a head outside of net."""
    found = dict(model.named_parameters())
    known = {id(parameter) for parameter in found.values()}
    for number, optimizer in enumerate(optimizers):
        rest = [p for group in optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(rest):
            if id(parameter) not in known:
                known.add(id(parameter))
                found[f"parameter {place} of optimiser {number}"] = parameter
    return found


def beside(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Those that only optimisers have."""
    own = dict(model.named_parameters())
    return {name: p for name, p in named(model, optimizers).items() if name not in own}


def gradients(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Those that there are: a script may clear them only after the next batch has come."""
    return {
        name: plain(parameter.grad)
        for name, parameter in named(model, optimizers).items()
        if parameter.grad is not None
    }


def tensors_of(
    name: str, parameter: nn.Parameter, table: Mapping[str, Entry], optimizers: Sequence[Optimizer]
) -> dict[tuple[str, str], Tensor]:
    """A weight as it lies on this device, and what of its shape belongs to it."""
    found = {(name, WEIGHT): plain(parameter)}
    for label, (kind, dtype, _) in table.items():
        if kind == PART:
            found[name, label] = held(parameter, label, dtype, optimizers)
    return found


def versions(parameters: Mapping[str, nn.Parameter], cut: Mapping[str, Any]) -> tuple[Any, ...]:
    """Other numbers than before where anybody has changed a cut weight or its gradient."""
    found: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():
        for name in cut:
            parameter = parameters[name]
            grad = parameter.grad
            found.append((parameter._version, None if grad is None else (id(grad), grad._version)))
    return tuple(found)


def marks(parameters: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
    """The same for all weights; also others where one was given other memory."""
    where = tuple(plain(parameter).data_ptr() for parameter in parameters.values())
    return where, versions(parameters, parameters)


def put_aside(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[Any]:
    """A weight that this device has all of, in memory of its own."""
    grad = taken(parameter)
    return [
        parameter.detach().clone(),
        None if grad is None else grad.detach().clone(),
        [copy.deepcopy(optimizer.state.get(parameter)) for optimizer in optimizers],
    ]


def put_back(parameter: nn.Parameter, kept: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    """The inverse; also where another plan has cut the weight since."""
    weight, grad, states = kept
    grad = None if grad is None else grad.clone()
    if isinstance(parameter, CutParameter):
        settle(parameter, weight.to(plain(parameter).device, copy=True), None, grad=grad)
    else:
        parameter.data.copy_(weight)
        parameter.grad = grad
    for optimizer, state in zip(optimizers, states, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = copy.deepcopy(state)

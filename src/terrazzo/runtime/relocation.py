"""Relocation: weights, their gradients and what optimisers keep for them move to new homes.

Every tensor with the shape of a weight moves by the same transfers as the weight. Devices first
tell each other what they keep, so that all refuse before anything has moved, and a device that held
nothing of a weight learns what it has to keep from now on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import UsageError
from terrazzo.runtime.cut import Home, plain, settle, taken
from terrazzo.runtime.links import Links
from terrazzo.schedule.relocation import everywhere, relocation
from terrazzo.schedule.tiling import Boxes

GRADIENT = "gradient"
PART, SINGLE, VALUE = "part", "single", "value"

Entry = tuple[str, str, Any]
"""Part of a weight's shape, single number in a tensor, or plain value; its dtype; the number."""


@dataclass(frozen=True)
class Mover:
    """One weight on its way, with all that belongs to it."""

    name: str
    parameter: nn.Parameter
    before: Boxes
    after: Boxes
    shape: torch.Size


class Relocation:
    """All weights of a model that a new plan wants elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        *,
        homes: Mapping[str, Home],
        wanted: Mapping[str, Boxes],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.links, self.optimizers = links, optimizers
        self.homes = dict(homes)
        """Where cut weights live; after a run, where they have come to live."""
        self.movers: list[Mover] = []
        for name, parameter in model.named_parameters():
            shape = homes[name].shape if name in homes else plain(parameter).shape
            whole = everywhere(tuple(shape), links.devices)
            before = homes[name].boxes if name in homes else whole
            after = wanted.get(name, whole)
            if before != after:
                self.movers.append(Mover(name, parameter, before, after, shape))
        self._kept = self._agreed()

    # ---- what there is to move -----------------------------------------------------------

    def _agreed(self) -> dict[str, dict[str, Entry]]:
        """What is kept for each weight, by those who hold a part of it; all refuse alike."""
        problem, own = "", {}
        try:
            own = {mover.name: self._entries(mover) for mover in self.movers}
        except UsageError as error:
            problem = str(error)
        texts = self.links.gather_text(json.dumps([problem, own])) if self.movers else []
        rows = [json.loads(text) for text in texts]
        for told, _ in rows:
            if told:
                raise UsageError(told)
        found: dict[str, dict[str, Entry]] = {}
        for mover in self.movers:
            holders = [device for device, box in enumerate(mover.before) if not box.is_empty]
            tables = [rows[device][1][mover.name] for device in holders]
            found[mover.name] = {label: tuple(entry) for label, entry in tables[0].items()}
            for device, table in zip(holders, tables, strict=True):
                if _kinds(table) != _kinds(tables[0]):
                    raise UsageError(
                        f"device {device} keeps {_told(table)} for {mover.name}, device "
                        f"{holders[0]} {_told(tables[0])}: give every device the same optimiser, "
                        "and change plans when all have made the same steps"
                    )
        return found

    def _entries(self, mover: Mover) -> dict[str, Entry]:
        """What this device keeps for a weight: its gradient, and the state of every optimiser."""
        found: dict[str, Entry] = {}
        gradient = taken(mover.parameter)
        if gradient is not None:
            found[GRADIENT] = (PART, _dtype(gradient), None)
        for number, optimizer in enumerate(self.optimizers):
            for key, value in optimizer.state.get(mover.parameter, {}).items():
                found[f"{number} {key}"] = self._entry(mover, str(key), value)
        return found

    def _entry(self, mover: Mover, key: str, value: Any) -> Entry:
        if isinstance(value, Tensor):
            tensor = plain(value)
            if tensor.shape == plain(mover.parameter).shape:
                return (PART, _dtype(tensor), None)
            if tensor.numel() == 1:
                return (SINGLE, _dtype(tensor), [list(tensor.shape), tensor.item()])
            seen = f"a tensor of shape {list(tensor.shape)}"
        elif value is None or isinstance(value, (bool, int, float, str)):
            return (VALUE, "", value)
        else:
            seen = f"a {type(value).__name__}"
        raise UsageError(
            f"the optimiser keeps {seen} as {key!r} for {mover.name} (here "
            f"{list(plain(mover.parameter).shape)} of {list(mover.shape)}): only what has the "
            "shape of a weight, or is one number, can move with it. Use SGD, Adam or another "
            "optimiser that works element by element, or keep the plan."
        )

    # ---- moving --------------------------------------------------------------------------

    def run(self) -> None:
        """Moves everything."""
        for mover in self.movers:
            self.links.where = f"moving {mover.name} to where a new plan wants it"
            cut = mover.after != everywhere(tuple(mover.shape), self.links.devices)
            home = Home(mover.name, mover.shape, mover.after, self.links) if cut else None
            self._move(mover, home)
            self.homes.pop(mover.name, None)
            if home is not None:
                self.homes[mover.name] = home

    def _move(self, mover: Mover, home: Home | None) -> None:
        table = self._kept[mover.name]
        labels = [label for label, entry in table.items() if entry[0] == PART]
        given = [self._held(mover, label, table[label][1]) for label in labels]
        part, *parts = self._moved(mover, [plain(mover.parameter), *given])
        arrived = dict(zip(labels, parts, strict=True))
        settle(mover.parameter, part, home, grad=arrived.pop(GRADIENT, None))
        for number, optimizer in enumerate(self.optimizers):
            start = f"{number} "
            mine = {label: entry for label, entry in table.items() if label.startswith(start)}
            if not mine:
                optimizer.state.pop(mover.parameter, None)
                continue
            state = optimizer.state[mover.parameter]
            for label, (kind, dtype, value) in mine.items():
                key = label.removeprefix(start)
                if kind == PART:
                    tensor = arrived[label]
                    state[key] = tensor if home is None else home.marked(tensor)
                elif key not in state and kind == SINGLE:
                    shape, number_ = value
                    state[key] = torch.full(shape, number_, dtype=getattr(torch, dtype))
                else:
                    state.setdefault(key, value)

    def _held(self, mover: Mover, label: str, dtype: str) -> Tensor:
        """What this device holds of something that belongs to a weight; nothing, where it had none.

        Only a device without a part of the weight can lack it.
        """
        if label == GRADIENT:
            found = taken(mover.parameter)
        else:
            number, _, key = label.partition(" ")
            value = self.optimizers[int(number)].state.get(mover.parameter, {}).get(key)
            found = plain(value) if isinstance(value, Tensor) else None
        weight = plain(mover.parameter)
        if found is None:
            return torch.empty(weight.shape, dtype=getattr(torch, dtype), device=weight.device)
        return found

    def _moved(self, mover: Mover, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same boxes of all these tensors, in one exchange, as bytes."""
        device = self.links.device
        have, want = mover.before[device], mover.after[device]
        routes = relocation(mover.before, mover.after)
        sends: list[tuple[int, int, Tensor]] = []
        receives: list[tuple[int, int, Tensor]] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        results = []
        for place, tensor in enumerate(tensors):
            result = torch.empty(want.shape, dtype=tensor.dtype, device=tensor.device)
            results.append(result)
            for number, route in enumerate(routes):
                tag = place * len(routes) + number
                here = (route.source == device, route.destination == device)
                if here[1]:
                    target = result[route.box.within(want).slices()]
                    if here[0]:
                        target.copy_(tensor[route.box.within(have).slices()])
                        continue
                    buffer = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                    receives.append((route.source, tag, _bytes(buffer)))
                    arrivals.append((target, buffer))
                elif here[0]:
                    piece = tensor[route.box.within(have).slices()].contiguous()
                    sends.append((route.destination, tag, _bytes(piece)))
        if self.links.devices > 1:
            self.links.exchange(sends, receives)
        for target, buffer in arrivals:
            target.copy_(buffer)
        return results


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: every dtype can travel."""
    return tensor.view(-1).view(torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kinds(table: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, str]]:
    return {label: (entry[0], entry[1]) for label, entry in table.items()}


def _told(table: Mapping[str, Sequence[Any]]) -> str:
    names = [label if label == GRADIENT else label.partition(" ")[2] for label in table]
    return ", ".join(names) or "nothing"

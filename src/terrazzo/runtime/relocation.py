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
from terrazzo.runtime.belongings import GRADIENT, PART, Entry, entries, hand_over, held
from terrazzo.runtime.cut import Home, plain
from terrazzo.runtime.links import Links
from terrazzo.runtime.wire import Parcel
from terrazzo.schedule.relocation import everywhere, relocation
from terrazzo.schedule.tiling import Boxes


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
            own = {
                mover.name: entries(mover.name, mover.parameter, mover.shape, self.optimizers)
                for mover in self.movers
            }
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
        labels = {label: entry[1] for label, entry in table.items() if entry[0] == PART}
        given = [
            held(mover.parameter, label, dtype, self.optimizers) for label, dtype in labels.items()
        ]
        part, *parts = self._moved(mover, [plain(mover.parameter), *given])
        hand_over(
            mover.parameter, home, part=part, table=table,
            arrived=dict(zip(labels, parts, strict=True)), optimizers=self.optimizers,
        )  # fmt: skip

    def _moved(self, mover: Mover, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same boxes of all these tensors, in one exchange, as bytes."""
        device = self.links.device
        have, want = mover.before[device], mover.after[device]
        routes = relocation(mover.before, mover.after)
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        results = []
        for tensor in tensors:
            result = torch.empty(want.shape, dtype=tensor.dtype, device=tensor.device)
            results.append(result)
            for route in routes:
                here = (route.source == device, route.destination == device)
                if here[1]:
                    target = result[route.box.within(want).slices()]
                    if here[0]:
                        target.copy_(tensor[route.box.within(have).slices()])
                        continue
                    buffer = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                    receives.append((route.source, _bytes(buffer)))
                    arrivals.append((target, buffer))
                elif here[0]:
                    piece = tensor[route.box.within(have).slices()].contiguous()
                    sends.append((route.destination, _bytes(piece)))
        if self.links.devices > 1:
            self.links.exchange(sends, receives)
        for target, buffer in arrivals:
            target.copy_(buffer)
        return results


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: every dtype can travel."""
    return tensor.view(-1).view(torch.uint8)


def _kinds(table: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, str]]:
    return {label: (entry[0], entry[1]) for label, entry in table.items()}


def _told(table: Mapping[str, Sequence[Any]]) -> str:
    names = [label if label == GRADIENT else label.partition(" ")[2] for label in table]
    return ", ".join(names) or "nothing"

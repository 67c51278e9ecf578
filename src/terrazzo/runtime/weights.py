"""The weights of a net: which are cut, and the model's own habits around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import PeerLost
from terrazzo.runtime.agreement import NOTHING, STATE, Note, compare
from terrazzo.runtime.cut import Home, cut, plain
from terrazzo.runtime.links import Links
from terrazzo.runtime.relocation import Relocation
from terrazzo.schedule import Program
from terrazzo.schedule.tiling import Boxes


class Weights:
    """Knows where every cut parameter of a model lives."""

    def __init__(self, model: nn.Module, links: Links) -> None:
        self.model, self.links = model, links
        self.homes: dict[str, Home] | None = None
        """By the parameter's name in the model; None until the first plan is known."""

    @property
    def kept(self) -> Mapping[str, Boxes] | None:
        """How parameters are cut already, for lowering another graph of the model."""
        if self.homes is None:
            return None
        return {name: home.boxes for name, home in self.homes.items()}

    def wanted(self, program: Program) -> dict[str, Boxes]:
        """What a program would cut, less what shares its memory under another name."""
        values = program.graph.values
        found = {values[name].target: boxes for name, boxes in program.homes.items()}
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        alone = {aliases[0] for aliases in names.values() if len(aliases) == 1}
        return {name: boxes for name, boxes in found.items() if name in alone}

    def cut(self, boxes: Mapping[str, Boxes]) -> None:
        """Leaves on this device the boxes that it uses, once and for all graphs."""
        self.homes = {}
        for name, where in boxes.items():
            parameter = self.model.get_parameter(name)
            home = Home(name, parameter.shape, where, self.links)
            self.homes[name] = home
            cut(parameter, home)

    def relocation(self, boxes: Mapping[str, Boxes], optimizers: Sequence[Optimizer]) -> Relocation:
        """The way from where cut parameters live to these boxes; refused where there is none."""
        homes = self.homes or {}
        return Relocation(self.model, self.links, homes=homes, wanted=boxes, optimizers=optimizers)

    def refuse_lost(self, kept: Sequence[int | None]) -> None:
        """A part of a weight that only one device held is lost with it."""
        for home in (self.homes or {}).values():
            if list(kept) != list(range(len(home.boxes))):
                raise PeerLost(
                    f"the weight {home.name} is cut over the devices and these have changed, so a "
                    "part of it is gone: start again from the last checkpoint, or keep weights "
                    "whole (a layout of tiles or samples) to go on after a loss"
                )

    @contextlib.contextmanager
    def shown_whole(self) -> Iterator[None]:
        """Inside, cut parameters look whole; their contents mean nothing."""
        hidden: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for name, home in (self.homes or {}).items():
            path, _, last = name.rpartition(".")
            owner = self.model.get_submodule(path)._parameters
            real = owner[last]
            assert real is not None
            stand_in = torch.zeros((), dtype=real.dtype, device=real.device).expand(home.shape)
            hidden.append((owner, last, real))
            owner[last] = nn.Parameter(stand_in, requires_grad=real.requires_grad)
        try:
            yield
        finally:
            for owner, last, real in hidden:
                owner[last] = real

    def gather(self) -> dict[str, Tensor]:
        """The cut parameters whole, on all devices together."""
        if not self.homes:
            return {}
        self.links.where = "bringing cut weights together"
        compare(self.links, Note(STATE, 0, "", NOTHING), explain="net.state_dict()")
        return {
            name: home.gather(plain(self.model.get_parameter(name)))
            for name, home in self.homes.items()
        }

    def parts(self, state: dict[str, Any], prefix: str) -> None:
        """Replaces whole weights, about to be loaded, by the parts that live here."""
        for name, home in (self.homes or {}).items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == home.shape:
                state[prefix + name] = home.part(given)

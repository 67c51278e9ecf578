"""The weights of a net: which are cut, and the model's own habits around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import PeerLost
from terrazzo.runtime.agreement import NOTHING, STATE, Note, compare
from terrazzo.runtime.cut import Home, cut, plain
from terrazzo.runtime.links import Links
from terrazzo.runtime.recovery import together
from terrazzo.runtime.relocation import Relocation
from terrazzo.runtime.spares import Spares
from terrazzo.schedule import Program
from terrazzo.schedule.tiling import Boxes


class Weights:
    """Knows where every cut parameter of a model lives."""

    def __init__(self, model: nn.Module, links: Links) -> None:
        self.model, self.links = model, links
        self.homes: dict[str, Home] | None = None
        """By the parameter's name in the model; None until a plan for these devices is known."""
        self.spares: Spares | None = None
        self.is_moving = False
        """Whether they are on their way from one plan's places to another's."""
        self._before: Mapping[str, Home] = {}
        """Where they lived, as long as there is no such plan."""

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

    @property
    def is_astray(self) -> bool:
        """Whether parts were lost, and the run has not yet gone back to its copies of them."""
        return self.spares is not None and self.spares.is_astray

    def cut(self, boxes: Mapping[str, Boxes]) -> None:
        """Leaves on this device the boxes that it uses, once and for all graphs."""
        if self.spares is not None and self.spares.is_astray:
            self.homes = self.spares.restore(boxes)
            self.spares.renew()
            return
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

    def follow(self, kept: Sequence[int | None]) -> None:
        """Other devices are here: parts of weights must come from copies, where there are any."""
        if self.spares is not None:
            self.spares.follow()
        homes = self.homes or {}
        count = len(next(iter(homes.values())).boxes) if homes else len(kept)
        if not self.is_moving and list(kept) == list(range(count)):
            return
        if not self.is_moving and not homes:
            return
        self._lose(homes)

    @property
    def is_out_of_place(self) -> bool:
        """Whether this device is in the middle of moving weights, or of bringing them back."""
        lost = self.homes is None and self.is_astray
        return self.is_moving or lost or (self.spares is not None and self.spares.is_restoring)

    def lose(self) -> None:
        """Some device is in the middle of it: nobody has moved anything, then."""
        if self.spares is not None and not (self.homes is None and self.is_astray):
            self._lose(self.homes or {})

    def _lose(self, homes: dict[str, Home]) -> None:
        name = next(iter(homes), "that was about to be cut")
        try:
            if self.spares is None:
                raise PeerLost("nobody keeps a copy: tz.Run(net, optimizer, loader=...) would")
            self.spares.lose()
        except PeerLost as error:
            raise PeerLost(
                f"the weight {name} is cut over the devices and these have changed, so a part of "
                f"it is gone, and {error}. Start again from the last checkpoint, or keep weights "
                "whole (a layout of tiles or samples)."
            ) from error
        self._before, self.homes, self.is_moving = homes, None, False

    @contextlib.contextmanager
    def shown_whole(self) -> Iterator[None]:
        """Inside, cut parameters look whole; their contents mean nothing."""
        hidden: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for name, home in (self._before if self.homes is None else self.homes).items():
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

    def gathered(self, place: Callable[[], None]) -> dict[str, Tensor]:
        """The cut parameters whole, on all devices together; ``place`` brings back lost parts."""
        if not self.homes and not self.is_astray:
            return {}

        def attempt() -> dict[str, Tensor]:
            place()
            self.links.where = "bringing cut weights together"
            compare(self.links, Note(STATE, 0, "", NOTHING), explain="net.state_dict()")
            return {
                name: home.gather(plain(self.model.get_parameter(name)))
                for name, home in (self.homes or {}).items()
            }

        return together(self.links, attempt)

    def parts(self, state: dict[str, Any], prefix: str) -> None:
        """Replaces whole weights, about to be loaded, by the parts that live here."""
        for name, home in (self.homes or {}).items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == home.shape:
                state[prefix + name] = home.marked(home.part(given))

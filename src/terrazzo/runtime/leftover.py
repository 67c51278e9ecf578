"""Leftover: gradients that no optimiser has used yet, where a loop adds up those of some batches.

A checkpoint between two such batches must hold them. All others would hold every gradient for
nothing: most loops clear them before the next is made. So optimisers tell when they have stepped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.runtime.cut import plain
from terrazzo.runtime.spare import gradients, named

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net


class Leftover:
    """What is left of backward passes since optimisers have stepped."""

    def __init__(self, net: Net, optimizers: Sequence[Optimizer]) -> None:
        self._net, self._optimizers = net, optimizers
        self._used = {id(optimizer): net.commits for optimizer in optimizers}
        """How many backward passes there were when each stepped last."""
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[id(optimizer)] = self._net.commits

    @property
    def unused(self) -> list[int]:
        """Backward passes since each optimiser's last step: the same on all devices."""
        return [self._net.commits - used for used in self._used.values()]

    @unused.setter
    def unused(self, told: Sequence[int]) -> None:
        for key, passes in zip(self._used, told, strict=True):
            self._used[key] = self._net.commits - passes

    def whole(self) -> dict[str, Tensor]:
        """By names of weights; where some are cut all devices must ask."""
        if not any(self.unused):
            return {}
        net = self._net
        found, homes = gradients(net._model, self._optimizers), net.homes
        weights = named(net._model, self._optimizers)
        for name in self._cut(found):
            part = found.get(name, torch.zeros_like(plain(weights[name])))
            found[name] = homes[name].gather(part)
        return found

    def _cut(self, found: Mapping[str, Tensor]) -> list[str]:
        """Cut weights of which any device has a gradient: one without a part may have none."""
        homes = self._net.homes
        if not homes:
            return []
        told = self._net.links.gather_text(json.dumps(sorted(homes.keys() & found.keys())))
        return sorted({name for text in told for name in json.loads(text)})

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """The next backward pass adds to these."""
        net = self._net
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in named(net._model, self._optimizers).items():
                if name in whole:
                    home = net.homes.get(name)
                    grad = whole[name].to(parameter.device)
                    parameter.grad = grad if home is None else home.part(grad)

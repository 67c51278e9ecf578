"""What a call of a net keeps, to be made again when a device is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrazzo.errors import UsageError
from terrazzo.runtime.cut import plain

if TYPE_CHECKING:
    from terrazzo.runtime.call import Call
    from terrazzo.runtime.net import Net


class Kept:
    """What a call needs to be made again: buffers as they were, weights as they still are."""

    def __init__(self, call: Call) -> None:
        graph = call.ready.graph
        changing = set(graph.mutations)
        self.buffers = {
            name: tensor.detach().clone()
            for name, tensor in call.state.items()
            if graph.values[name].target in changing
        }
        with torch._C.DisableTorchFunctionSubclass():
            self.shapes = {name: tensor.shape for name, tensor in call.leaves.items()}
            self._versions = {
                name: tensor._version
                for name, tensor in call.state.items()
                if graph.values[name].kind == "parameter"
            }

    def put_back(self, call: Call) -> None:
        """Buffers are what they were before the call."""
        with torch.no_grad():
            for name, tensor in self.buffers.items():
                call.state[name].copy_(tensor)

    def check(self, call: Call) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, version in self._versions.items():
                if call.state[name]._version != version:
                    raise UsageError(
                        f"the weight {call.ready.graph.values[name].target} was changed between "
                        "net's forward and backward, and a device was lost: the forward pass "
                        "cannot be made again. Call backward before optimizer.step()."
                    )

    def nothing(self, call: Call) -> dict[str, Tensor]:
        """Gradients of a step that will be made again: parts of weights were lost in it."""
        return {
            name: torch.zeros_like(plain(tensor))
            for name, tensor in call.leaves.items()
            if plain(tensor).shape == self.shapes[name]
        }


def forget_calls(net: Net, *, since: int) -> bool:
    """Buffers are what they were before some calls; False where that is not known any more."""
    made: list[Call] = sorted(
        (call for call in net._begun if call.number > since), key=lambda call: call.number
    )
    if net.calls - since > len(made) + 1:  # the last may not have come to its end
        return False
    if made and made[0].kept is not None:
        made[0].kept.put_back(made[0])
    net.calls = since
    return True

"""Turn: a forward call of a net as an operation of all devices, made again where one is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from terrazzo.errors import PeerLost
from terrazzo.records import Ref
from terrazzo.runtime.call import Call, Ready
from terrazzo.runtime.part import Part
from terrazzo.runtime.recovery import Give, give_tensors, perform, take_tensors

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net

SMALL_BYTES = 1 << 16


class Made(NamedTuple):
    """What came of it."""

    call: Call
    outputs: list[Any]


class Turn:
    """The inputs of one call, and the ways to its outputs."""

    def __init__(self, net: Net, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        self.net, self.leaves, self.tree = net, leaves, tree
        self.begun: Call | None = None

    def run(self) -> Any:
        try:
            made: Made = perform(self.net.links, self._attempt, take=self._take, give=self._give)
        except BaseException:
            self._undo()
            raise
        return pytree.tree_unflatten(made.outputs, made.call.ready.output_tree)

    def _undo(self) -> None:
        """Buffers as they were: who was interrupted behind the last operator has changed them."""
        begun, self.begun = self.begun, None
        if begun is not None and begun.kept is not None:
            begun.kept.put_back(begun)

    def _attempt(self) -> Made:
        self._undo()
        key = self.net._key(self.leaves, self.tree)
        self.net._open(self.leaves, key)
        ready = self.net._prepared(self.leaves, self.tree, key)
        self.leaves = relaid(self.net, ready, self.leaves)
        self.begun = call = Call(self.net, ready, self.leaves)
        return Made(call, call.run())

    def _ready(self) -> Ready:
        return self.net._prepared(self.leaves, self.tree, self.net._key(self.leaves, self.tree))

    def _give(self, made: Made) -> Give:
        """Outputs, and the buffers as they are after the call, for those who missed its end."""
        outputs = [
            _kept(output.detach())
            for output, argument in zip(made.outputs, made.call.ready.graph.outputs, strict=True)
            if isinstance(argument, Ref)
        ]
        changing, versions = made.call.ready.changing, [output._version for output in outputs]

        def give(source: int) -> None:
            self._ready()
            if versions != [output._version for output in outputs]:
                raise PeerLost(
                    f"the output of call {made.call.number} was changed in place, and a device was "
                    "lost before all others had it: they would get the changed one. Make a new "
                    "tensor, out = out.clamp(min=0), instead of out.clamp_(min=0)"
                )
            give_tensors(self.net.links, [*outputs, *(get() for get in changing.values())], source)

        return give

    def _take(self, source: int) -> Made:
        self._undo()
        ready = self._ready()
        tensors, _ = take_tensors(self.net.links, source)
        count = len(tensors) - len(ready.changing)
        self.begun = call = Call(self.net, ready, self.leaves, received=tensors[:count])
        outputs = call.run()
        with torch.no_grad():
            for get, tensor in zip(ready.changing.values(), tensors[count:], strict=True):
                get().copy_(tensor)
        return Made(call, outputs)


def _kept(output: torch.Tensor) -> torch.Tensor:
    """Small outputs are copied: a script may change its own in place."""
    return output.clone() if output.nbytes <= SMALL_BYTES else output


def relaid(net: Net, ready: Ready, leaves: Sequence[Any]) -> list[Any]:
    """Inputs that were fed for another plan, fed again: the device that reads has all of them."""
    found, links = [], net.links
    for name, leaf in zip(ready.graph.inputs, leaves, strict=True):
        if isinstance(leaf, Part) and leaf.origin is not None and leaf.origin.epoch != links.epoch:
            whole = leaf.shape
            boxes = ready.machine.program.given.get(name or "") or leaf.whole_boxes(links.devices)
            leaf = leaf.again(boxes, links.device)
            assert leaf.shape == whole
        found.append(leaf)
    return found

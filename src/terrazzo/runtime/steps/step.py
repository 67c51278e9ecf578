"""What steps share: the state of one call, and the door into autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from terrazzo.geometry import Box
from terrazzo.runtime.allocator import Room
from terrazzo.runtime.gradients import Buckets
from terrazzo.runtime.kernels import Site
from terrazzo.runtime.links import Links
from terrazzo.runtime.pending import Voyage
from terrazzo.schedule import Array, Program


@dataclass(frozen=True)
class Given:
    """An input of the call: all of it, or only the box that this device was given."""

    tensor: Tensor
    box: Box


@dataclass
class Run:
    """One call of a program on this device: what is held, saved and flowing back."""

    program: Program
    links: Links
    dtypes: Mapping[str, torch.dtype]
    carriers: frozenset[str]
    given: Mapping[str, Given]
    seed: int
    step: int
    torch_device: torch.device
    held: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    input_parts: dict[str, Tensor] = field(default_factory=dict)
    exclusive: set[str] = field(default_factory=set)
    """Gradients in memory of our own, which may be overwritten."""
    watched: list[tuple[str, Tensor, int]] = field(default_factory=list)
    """Arrays that are read again on the way back, and how often they had been written before."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """Gradients of weights still to be made, in order: work for the time messages take."""
    live: frozenset[str] = frozenset()
    buckets: Buckets | None = None
    autocast: torch.dtype | None = None
    room: Room | None = None
    """What this call may take, where memory is short."""
    under_way: tuple[Voyage, Any] | None = None
    """The exchange that was begun and not ended yet, and what is to be done with what arrives."""

    @property
    def device(self) -> int:
        return self.links.device

    def array(self, name: str) -> Array:
        return self.program.arrays[name]

    def box(self, name: str) -> Box:
        """What this device holds of an array."""
        array = self.program.arrays[name]
        if array.boxes is None:
            return Box.whole(self.program.graph.shape(array.value))
        return array.boxes[self.links.device]

    def empty(self, name: str) -> Tensor:
        return torch.empty(self.box(name).shape, dtype=self.dtype(name), device=self.torch_device)

    def zeros(self, name: str) -> Tensor:
        return torch.zeros(self.box(name).shape, dtype=self.dtype(name), device=self.torch_device)

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[self.program.arrays[name].value]

    def site(self, shape: tuple[int, ...], box: Box) -> Site:
        return Site(shape, box, self.seed, self.step, self.torch_device)

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast of the forward call, for computing something again."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=self.autocast)

    def add(self, name: str, grad: Tensor) -> None:
        """Adds to the gradient of an array."""
        before = self.grads.get(name)
        if before is None:
            self.grads[name] = grad
        elif name in self.exclusive:
            before.add_(grad)
        else:
            self.grads[name] = before + grad
            self.exclusive.add(name)

    def ease(self, wanted: Iterable[str] = ()) -> None:
        """Between two pieces of work: keeps this process as small as it can be, with arrays like
        those ``wanted`` to be made at once."""
        if self.room is not None:
            sizes = (self.box(name).size * self.dtype(name).itemsize for name in wanted)
            self.room.ease(sum(sizes))

    def watch(self, arrays: Mapping[str, Tensor]) -> None:
        """Whether these are changed before the way back is noticed."""
        self.watched += [(name, tensor, tensor._version) for name, tensor in arrays.items()]

    def catch_up(self) -> None:
        """Makes the gradients that had to wait."""
        while self.later:
            self.later.pop(0)()

    def landing(self) -> tuple[Voyage, Any]:
        """The exchange that was begun, to be ended now."""
        assert self.under_way is not None
        found, self.under_way = self.under_way, None
        return found

    def gradient_so_far(self, name: str) -> Tensor:
        """The gradient of an array, left where it is: more may be added."""
        if name not in self.grads:
            self.grads[name] = self.zeros(name)
            self.exclusive.add(name)
        return self.grads[name]

    def take_exclusive(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients among these that are ours, taken out to be gone on with."""
        found = {name: self.grads.pop(name) for name in names if name in self.exclusive}
        self.exclusive -= found.keys()
        return found

    def gradient(self, name: str) -> Tensor:
        """The gradient of an array this backward pass reaches; zeros if none came from here."""
        found = self.grads.pop(name, None)
        self.exclusive.discard(name)
        return self.zeros(name) if found is None else found


class DeviceStep(Protocol):
    """A step made ready for one device."""

    def forward(self, run: Run) -> None: ...

    def backward(self, run: Run) -> None: ...


class Entry(torch.autograd.Function):
    """The door into a piece of autograd: catches the gradient without keeping the tensor alive."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, tensor: Tensor, sink: dict[str, Tensor], name: str
    ) -> Tensor:
        ctx.sink, ctx.name = sink, name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.sink[ctx.name] = grad
        return None, None, None, None


@dataclass
class Piece:
    """One piece of autograd: tensors enter, edges leave, gradients run through it once."""

    token: Tensor
    sink: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)

    @classmethod
    def open(cls, device: torch.device) -> Piece:
        return cls(torch.zeros((), device=device, requires_grad=True))

    def enter(self, name: str, tensor: Tensor) -> Tensor:
        entered: Tensor = Entry.apply(self.token, tensor, self.sink, name)  # type: ignore[no-untyped-call]
        return entered

    def enter_staying(self, name: str, tensor: Tensor) -> Tensor:
        """The same for a tensor that stays alive anyhow: torch keeps its gradient, at less cost."""
        leaf = self.leaves[name] = tensor.detach().requires_grad_()
        return leaf

    def leave(self, name: str, tensor: Tensor) -> None:
        """Keeps the way back from a tensor, not the tensor.

        The edge is that of a view: it belongs to torch, while an edge into a Python function was
        not kept alive by older versions of torch.
        """
        if tensor.requires_grad:
            with torch.enable_grad():
                tensor = tensor.view_as(tensor)
            self.edges[name] = torch.autograd.graph.get_gradient_edge(tensor)

    def backward(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of what entered, from gradients of what left."""
        names = [name for name in self.edges if name in grads]
        if names:
            _, *found = _differentiate(
                tuple(self.edges[name] for name in names),
                (self.token, *self.leaves.values()),
                tuple(grads[name] for name in names),
            )
            given = zip(self.leaves, found, strict=True)
            self.sink.update((name, grad) for name, grad in given if grad is not None)
        return self.sink


def _differentiate(
    edges: tuple[GradientEdge, ...], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad`` without its look at the shapes of gradients, which loads sympy: 33
    MiB of every process, to say that shapes of ours are as they were."""
    engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if engine is None:  # torch may rename it
        return torch.autograd.grad(edges, inputs, grads, allow_unused=True)
    found: Sequence[Tensor | None] = engine(
        edges, grads, False, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return found

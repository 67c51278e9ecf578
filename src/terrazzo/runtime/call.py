"""Call: one call of a net, from its inputs to agreed gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from terrazzo.errors import NotANumber, RunError, UsageError
from terrazzo.geometry import Box
from terrazzo.graph.export import Export
from terrazzo.records import Graph, Ref
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import BACKWARD, COMMIT, NOTHING, Note, compare, digest
from terrazzo.runtime.arithmetic import full_float32
from terrazzo.runtime.cut import CutParameter, shown_to_hooks
from terrazzo.runtime.kept import Kept
from terrazzo.runtime.links import Links
from terrazzo.runtime.machine import Machine
from terrazzo.runtime.part import Part
from terrazzo.runtime.recovery import perform
from terrazzo.runtime.steps.step import Given, Run

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net


@dataclass(frozen=True)
class Ready:
    """One graph, planned and ready to run: for one mode and one set of input shapes."""

    export: Export
    machine: Machine
    output_tree: pytree.TreeSpec
    state: Mapping[str, Callable[[], Tensor]]
    """The tensors of the model that the graph reads, by name of their value."""
    changing: Mapping[str, Callable[[], Tensor]]
    """The buffers that the graph gives new values, by their name in the model."""

    @property
    def graph(self) -> Graph:
        return self.export.graph


class Call:
    """One call of a net: its inputs, its run, and the two moments of agreement."""

    def __init__(
        self,
        net: Net,
        ready: Ready,
        leaves: Sequence[Any],
        *,
        received: Sequence[Tensor] | None = None,
    ) -> None:
        """``received`` are the outputs, where others have finished this call already."""
        self.net, self.ready, self.machine = net, ready, ready.machine
        self.number = net.calls
        self.links: Links = net.links
        self.epoch = self.links.epoch
        self.received = received
        graph = ready.graph
        self._take(leaves, checked=received is None)
        self.state = {name: get() for name, get in ready.state.items()}
        self.torch_device = self._place()
        self.with_grad = torch.is_grad_enabled()
        wanted = {
            **{name: given.tensor for name, given in self.given.items()},
            **{n: t for n, t in self.state.items() if graph.values[n].kind == "parameter"},
        }
        with torch._C.DisableTorchFunctionSubclass():  # asking a cut weight its way takes longer
            self.leaves = {
                name: tensor
                for name, tensor in wanted.items()
                if self.with_grad and tensor.requires_grad
            }
        self.run_state: Run | None = None
        self.worked_s = 0.0
        self.autocast = _autocast(self.torch_device)
        self.staged: dict[str, Tensor] | None = None
        self.is_spent = False
        self.kept = Kept(self) if self.links.recovery is not None else None

    def _take(self, inputs: Sequence[Any], *, checked: bool = True) -> None:
        """What the call is given."""
        graph, self.inputs = self.ready.graph, inputs
        named = {name: leaf for name, leaf in zip(graph.inputs, inputs, strict=True) if name}
        if checked:
            _check_parts(named, self.machine, self.links)
        self.given = {
            name: Given(leaf.tensor, leaf.box)
            if isinstance(leaf, Part)
            else Given(leaf, Box.whole(graph.shape(name)))
            for name, leaf in named.items()
        }

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts how long this device computes, without what it spends on others."""
        counters = self.links.counters
        begin, away_s = time.perf_counter(), counters.away_s
        yield
        self.worked_s += time.perf_counter() - begin - (counters.away_s - away_s)

    def _place(self) -> torch.device:
        """Where this call computes: where its inputs and the model's tensors lie."""
        values = self.ready.graph.values
        lying: dict[torch.device, str] = {}
        for name, given in self.given.items():
            if given.tensor.dim():  # single numbers may come from anywhere, as in torch
                lying.setdefault(given.tensor.device, f"the input {name!r}")
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in self.state.items():
                if tensor.dim() and values[name].kind != "constant":
                    lying.setdefault(tensor.device, values[name].target)
        if len(lying) > 1:
            text = (
                f"{' and '.join(f'{what} is on {device}' for device, what in lying.items())}, on "
                f"device {self.links.device}: move the model before tz.parallelize, and what it is "
                "given with .to()"
            )
            self.links.abort(text)  # the others cannot know
            raise UsageError(text)
        return next(iter(lying), torch.device("cpu"))

    def _run(self) -> Run:
        device = self.torch_device
        return Run(
            program=self.machine.program,
            links=self.links,
            dtypes=self.machine.dtypes(device),
            carriers=self.machine.carriers(frozenset(self.leaves)),
            given=self.given,
            seed=self.net.seed,
            step=self.number,
            torch_device=device,
            autocast=self.autocast,
        )

    def _held(self) -> dict[str, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            held = {name: tensor.detach() for name, tensor in self.state.items()}
        if self.kept is not None:
            held |= self.kept.buffers
        for name, value in self.ready.graph.values.items():
            if value.kind == "constant" and name in held:  # shipped by another kind of device
                held[name] = held[name].to(self.torch_device)
        for name, given in self.given.items():
            held[name] = given.tensor.detach()
        return held

    def run(self) -> list[Any]:
        """Forward; gives the outputs of the model in order."""
        if self.leaves:
            _refuse_hooks()
            names, tensors = list(self.leaves), list(self.leaves.values())
            results = Node.apply(self, names, *tensors)  # type: ignore[no-untyped-call]
        else:
            results = self.forward()
        outputs, position = [], iter(results)
        for argument in self.ready.graph.outputs:
            outputs.append(next(position) if isinstance(argument, Ref) else argument)
        return outputs

    def forward(self) -> tuple[Tensor, ...]:
        """Runs the program, then lets the new buffers be seen."""
        if self.received is not None:
            return self._receive(self.received)
        run = self._run()
        with torch.no_grad(), full_float32(self.torch_device):
            with self._timed():
                values = self.machine.forward(run, self._held())
            names = [a.name for a in self.ready.graph.outputs if isinstance(a, Ref)]
            outputs = tuple(values[name] for name in names)
            if self.net._nan == "raise" and any(
                t.is_floating_point() and bool(t.isnan().any()) for t in outputs
            ):
                raise self.machine.find_nan(self._run(), self._held())
            for target, name in self.ready.graph.mutations.items():
                self.ready.changing[target]().copy_(values[name])
        if run.carriers:
            self.net._begun.add(self)
        else:
            run.held.clear()
        self.run_state = run
        return outputs

    def _receive(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Others have finished this call; its way back is computed when it is asked for."""
        self.run_state = self._run()
        self.epoch = -1
        self.received = None
        if self.run_state.carriers:
            self.net._begun.add(self)
        return tuple(outputs)

    def _again(self) -> Run:
        """The forward pass once more, by the plan of those who are here now."""
        assert self.kept is not None
        self.kept.check(self)
        self.ready = self.net.prepare_again(self.ready)
        self.machine, self.epoch = self.ready.machine, self.links.epoch
        self._take(self.net.relaid(self.ready, self.inputs))
        enabled = self.autocast is not None
        with (
            torch.no_grad(),
            full_float32(self.torch_device),
            torch.autocast(self.torch_device.type, dtype=self.autocast, enabled=enabled),
        ):
            run = self._run()
            self.machine.forward(run, self._held())
        return run

    def backward(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Backward; gives the gradients of parameters and inputs once all devices agree."""
        if self.is_spent or self.run_state is None:
            raise RunError(
                "backward ran through this call of net already. Add the losses up and call "
                "backward once; retain_graph=True is not supported through a net."
            )
        self.is_spent = True
        names = [a.name for a in self.ready.graph.outputs if isinstance(a, Ref)]
        known: dict[str, Tensor] = {}
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                known[name] = known[name] + grad if name in known else grad
        found: dict[str, Tensor] = perform(
            self.links, lambda: self._backward(known), take=self._roll_forward, give=lambda _: None
        )
        # Only now: whoever is interrupted behind the last note begins again with the same number.
        self.net.commits += 1
        self.staged = None
        return found

    def _backward(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.staged = None
        recorder = self.links.recorder
        if recorder is not None:
            recorder.call, recorder.phase = self.number, "backward"
        self._open_backward(known)
        run, self.run_state = self.run_state, None
        if self.epoch != self.links.epoch and self.net._weights.is_astray:
            assert self.kept is not None
            self.staged = self.kept.nothing(self)
            self._commit(self.staged)
            return self.staged
        if run is None or self.epoch != self.links.epoch:
            run = self._again()
        # Autocast around the caller's backward() is none of ours: on the way back every tensor has
        # its precision already, and what is computed again is so as it was first.
        plain = torch.autocast(self.torch_device.type, enabled=False)
        with torch.no_grad(), plain, full_float32(self.torch_device), self._timed():
            found = self.machine.backward(run, known)
        self.staged = found
        self._commit(found)
        if run.torch_device.type == "cpu":  # a GPU computes on while this process is ahead
            self.net._pace.worked(self.ready.graph.digest, self.worked_s)
        if recorder is not None:
            counters = self.links.counters
            recorder.end(sent_bytes=counters.sent_bytes, summed_bytes=counters.summed_bytes)
        return found

    def _roll_forward(self, source: int) -> dict[str, Tensor]:
        """Somebody has seen the last note of all: what was staged here is committed."""
        assert self.staged is not None, "who finished has heard that this device has staged"
        return self.staged

    def _open_backward(self, known: Mapping[str, Tensor]) -> None:
        sums, tolerance = digest(list(known.values()))
        subject = fingerprint(sorted(known), self.number)
        note = Note(BACKWARD, self.net.commits, subject, sums, tolerance=tolerance)
        self.links.where = "the agreement before a backward pass"
        story = f"backward of call {self.number}, gradients for {', '.join(sorted(known))}"
        compare(self.links, note, explain=story)

    def _commit(self, found: Mapping[str, Tensor]) -> None:
        bad = _first_nan(found) if self.net._nan == "raise" else ""
        note = Note(COMMIT, self.net.commits, "", NOTHING, flag=float(bool(bad)))
        self.links.where = "the agreement after a backward pass"
        flags = compare(self.links, note, explain=f"end of backward of call {self.number}")
        if any(flags):
            value = self.ready.graph.values.get(bad)
            label = (value.target or bad) if value else "a parameter on another device"
            devices = ", ".join(str(d) for d, flag in enumerate(flags) if flag)
            raise NotANumber(
                f"the gradient of {label} is NaN (seen on device {devices}). Lower the learning "
                'rate, clip gradients or look at the data; nan="allow" lets it pass.'
            )


class Node(torch.autograd.Function):
    """The one node that a call of net is in the user's graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.names = call, names
        ctx.given = [one if isinstance(one, CutParameter) else None for one in tensors]
        ctx.set_materialize_grads(False)
        outputs = call.forward()
        assert call.run_state is not None
        arrays = call.machine.program.outputs
        results = [a.name for a in call.ready.graph.outputs if isinstance(a, Ref)]
        fixed = [
            tensor
            for name, tensor in zip(results, outputs, strict=True)
            if arrays[name] not in call.run_state.carriers
        ]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with ctx.call.net._careful():
            found = ctx.call.backward(grads)
        return (None, None, *map(_shown, ctx.given, map(found.get, ctx.names)))


def _shown(given: CutParameter | None, grad: Tensor | None) -> Tensor | None:
    return grad if given is None or grad is None else shown_to_hooks(given, grad)


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _first_nan(grads: Mapping[str, Tensor]) -> str:
    """The name of the first gradient with NaN in it, if there is any."""
    if not grads:
        return ""
    whole = {id(base): base for base in map(_summed_with, grads.values())}
    if not bool(torch.stack([part.sum().double() for part in whole.values()]).isnan().any()):
        return ""
    return next((name for name, grad in grads.items() if bool(grad.isnan().any())), "")


def _summed_with(grad: Tensor) -> Tensor:
    """All that was summed over devices together with a gradient: fewer tensors to look at."""
    return grad if grad._base is None else grad._base


def _refuse_hooks() -> None:
    """What a net saves cannot be packed by others: recomputing it would be a call of its own."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    if hooks(True) is not None:
        raise UsageError(
            "net was called under saved-tensor hooks (torch.utils.checkpoint with "
            "use_reentrant=False, or save_on_cpu), which cannot reach what a net saves: call it "
            "outside of them; tz.parallelize(..., memory=) or passes= need less memory"
        )


def _check_parts(inputs: Mapping[str, Any], machine: Machine, links: Links) -> None:
    """Every device holds what its steps read, or all are told who does not."""
    parts = {name: leaf for name, leaf in inputs.items() if isinstance(leaf, Part)}
    if not parts:
        return
    problem = ""
    for name, part in parts.items():
        boxes = machine.program.given.get(name)
        if boxes and not part.box.contains(boxes[links.device]):
            problem = (
                f"input {name!r} holds {part.box} of {list(part.shape)}, this net needs "
                f"{boxes[links.device]}"
            )
    flags = links.gather(torch.tensor([float(bool(problem))]), counted=False)
    if bool(flags.any()):
        told = problem or f"device {int(flags.flatten().argmax())} holds another part than it needs"
        raise UsageError(f"{told}: it was fed for another plan. Feed it with tz.feed(loader, net).")

"""Net: a model spread over devices that looks like the model.

One call of a net is one node of the user's autograd graph. Inside, forward and backward run
through the steps of a program; gradients and new buffers are staged, and become visible only when
all devices have agreed.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from terrazzo.errors import NotANumber, RunError, TerrazzoError, UsageError
from terrazzo.geometry import Box
from terrazzo.graph.export import Export
from terrazzo.records import Graph, Plan, Ref
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import BACKWARD, COMMIT, FORWARD, NOTHING, Note, compare, digest
from terrazzo.runtime.alignment import align_weights
from terrazzo.runtime.links import Links
from terrazzo.runtime.machine import Machine
from terrazzo.runtime.part import Part
from terrazzo.runtime.shipping import export_together
from terrazzo.runtime.steps.step import Given, Run
from terrazzo.schedule import lower

PlanFor = Callable[[Graph], Plan]


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


class Net(nn.Module):
    """Made by ``tz.parallelize``; parameters, buffers and state_dict names are the model's own."""

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        plan_for: PlanFor,
        *,
        seed: int,
        nan: str,
        align_every: int,
    ) -> None:
        super().__init__()
        self.__dict__.update(
            _model=model, _links=links, _plan_for=plan_for, _ready={}, _nan=nan,
            _align_every=align_every, _example=(),
        )  # fmt: skip
        self.seed, self.calls, self.commits, self.realigned = seed, 0, 0, 0
        # The same dictionaries, not copies: what happens to one happens to the other.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training

    # ---- looking like the model ---------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __getitem__(self, index: Any) -> Any:
        return self._model[index]

    def train(self, mode: bool = True) -> Net:
        self._model.training = mode
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of a net is a plain copy of its model, for an average of weights, say."""
        copied: nn.Module = copy.deepcopy(self._model, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A saved net is its model, and loads without Terrazzo."""
        return operator.itemgetter(0), ((self._model,),)

    def extra_repr(self) -> str:
        return f"on {self._links.devices} devices"

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for this first; wrapping a net again would be wrong."""
        raise UsageError(
            "this net already spreads its work and sums its gradients: do not wrap it in "
            "DistributedDataParallel"
        )

    @property
    def plan(self) -> Plan:
        """The plan of the latest call (or of the example input)."""
        ready: Ready = next(reversed(self._ready.values()))
        return ready.machine.program.plan

    @property
    def program(self) -> Any:
        """The program of the latest call (or of the example input)."""
        ready: Ready = next(reversed(self._ready.values()))
        return ready.machine.program

    def carriers(self, leaves: frozenset[str]) -> frozenset[str]:
        """The arrays of the program that carry a gradient when these leaves do."""
        ready: Ready = next(reversed(self._ready.values()))
        return ready.machine.carriers(leaves)

    @property
    def links(self) -> Links:
        """This device among the others, with its counters of bytes."""
        return self._links  # type: ignore[no-any-return]

    def align(self) -> int:
        """Compares weights and buffers, and takes device 0's where they differ by rounding.

        Gives the number of tensors that differed.
        """
        with self._careful():
            changed = align_weights(self._model, self._links)
        self.realigned += changed
        return changed

    # ---- getting ready ------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Ready:
        """Exports and plans for inputs like these, unless that was done before."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        modules = tuple(id(module) for module in self._model.modules())
        key = (self._key(leaves, tree), modules)  # a layer put in place of another counts too
        ready: Ready | None = self._ready.pop(key, None)
        if ready is None:
            ready = self._make_ready(leaves, tree)
        self._ready[key] = ready  # the latest is last
        if not self._example:
            self.__dict__["_example"] = (leaves, tree)
        return ready

    def _make_ready(self, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Ready:
        same = Note(FORWARD, self.calls, fingerprint(self._key(leaves, tree)), NOTHING)
        compare(self._links, same, explain=f"preparing for {_story(leaves, self)}")
        examples = [leaf.example() if isinstance(leaf, Part) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(examples, tree)
        exported = export_together(self._model, self._links, args=args, kwargs=kwargs)
        program = lower(exported.graph, self._plan_for(exported.graph))
        subject = fingerprint(program.plan.to_json())
        note = Note(FORWARD, self.calls, subject, NOTHING)
        compare(self._links, note, explain=f"plan {subject} for graph {exported.graph.digest}")
        tree_out = pytree.treespec_loads(exported.graph.output_tree)
        changing = {target: self._owned(target, "buffer") for target in exported.graph.mutations}
        machine = Machine(program, self._links)
        return Ready(exported, machine, tree_out, self._state(exported), changing)

    def _state(self, exported: Export) -> Mapping[str, Callable[[], Tensor]]:
        """How to get at each parameter, buffer and constant of a graph as it is at the time."""
        found: dict[str, Callable[[], Tensor]] = {}
        for value in exported.graph.values.values():
            if value.kind == "constant":
                found[value.name] = _constant(exported.constants[value.target])
            elif value.kind in ("parameter", "buffer"):
                found[value.name] = self._owned(value.target, value.kind)
        return found

    def _owned(self, target: str, kind: str) -> Callable[[], Tensor]:
        path, _, name = target.rpartition(".")
        module = self._model.get_submodule(path)
        return lambda: (module._parameters if kind == "parameter" else module._buffers)[name]

    def _key(self, leaves: Sequence[Any], tree: pytree.TreeSpec) -> tuple[object, ...]:
        """What a graph depends on: input shapes, constants, modes, settings and precisions."""
        described = tuple(
            (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, (Tensor, Part)) else leaf
            for leaf in leaves
        )
        precision = tuple({str(p.dtype): None for p in self._model.parameters()})
        settings = tuple(_settings(*named) for named in self._model.named_modules())
        return described, str(tree), settings, precision

    def boxes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Box, ...]]:
        """For inputs of these shapes (of the precision of the example), what each device needs."""
        leaves, tree = self._example
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Part))]
        if len(shapes) > len(places):
            raise UsageError(f"this net takes {len(places)} tensors, {len(shapes)} were fed")
        examples = list(leaves)
        for place, shape in zip(places, shapes, strict=False):
            examples[place] = torch.zeros(shape, dtype=leaves[place].dtype)
        args, kwargs = pytree.tree_unflatten(examples, tree)
        ready = self.prepare(args, kwargs)
        given, inputs = ready.machine.program.given, ready.graph.inputs
        whole = [(Box.whole(shape),) * self._links.devices for shape in shapes]
        return [given.get(inputs[p], w) for p, w in zip(places, whole, strict=False)]

    # ---- calling ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._careful():
            leaves, tree = pytree.tree_flatten((args, kwargs))
            if self._links.recorder is not None:
                self._links.recorder.call, self._links.recorder.phase = self.calls + 1, "forward"
            self._open(leaves, tree)
            ready = self.prepare(args, kwargs)
            outputs = Call(self, ready, leaves).run()
        return pytree.tree_unflatten(outputs, ready.output_tree)

    def _open(self, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        """Before any work: all devices confirm that they make the same call."""
        self.calls += 1
        links = self._links
        if links.devices == 1:
            return
        if self._align_every and self.training and self.calls % self._align_every == 0:
            self.realigned += align_weights(self._model, links)
        trained = [p.requires_grad for p in self._model.parameters()]
        followed = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        cast = torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu"))
        context = (torch.is_grad_enabled(), cast, self.seed)
        subject = fingerprint(self._key(leaves, tree), trained, followed, context)
        whole = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fed = any(isinstance(leaf, Part) for leaf in leaves)
        sums, tolerance = digest([] if fed else whole)
        note = Note(FORWARD, self.calls, subject, sums, tolerance=tolerance)
        links.where = "the agreement before a forward call"
        compare(links, note, explain=f"call {self.calls}: {_story(leaves, self)}")

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """An error on this device alone must wake the others: it closes the connections."""
        try:
            yield
        except RunError:
            raise
        except BaseException as error:
            if self._links.devices > 1 and not _foreseen_everywhere(error):
                self._links.abort(
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            raise


PLAIN = (bool, int, float, str, tuple, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _settings(layer: str, module: nn.Module) -> tuple[object, ...]:
    """The plain attributes of a layer: a graph is made for their values."""
    attributes = vars(module)
    for hooks in HOOKS:
        if attributes.get(hooks):
            raise UsageError(
                f"{layer or 'the model'} ({type(module).__name__}) has a hook ({hooks[1:]}), which "
                "a net would not call: remove it, or leave the layer out of what is parallelized"
            )
    plain = tuple(
        (name, repr(value) if isinstance(value, tuple) else value)
        for name, value in attributes.items()
        if isinstance(value, PLAIN) and name[0] != "_"
    )
    return type(module).__name__, plain


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _foreseen_everywhere(error: BaseException) -> bool:
    """Errors that every device meets at the same place need no waking."""
    return isinstance(error, TerrazzoError)


def _story(leaves: Sequence[Any], net: Net) -> str:
    """What this device is about to do, in words."""
    shapes = [
        f"{'x'.join(map(str, leaf.shape))} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in leaves
        if isinstance(leaf, (Tensor, Part))
    ]
    parameters = list(net._model.parameters())
    trained = sum(p.requires_grad for p in parameters)
    return (
        f"forward in {'train' if net.training else 'eval'} mode, inputs {', '.join(shapes)}, "
        f"gradients {'on' if torch.is_grad_enabled() else 'off'}, {trained} of "
        f"{len(parameters)} parameters trained, seed {net.seed}"
    )


class Call:
    """One call of a net: its inputs, its run, and the two moments of agreement."""

    def __init__(self, net: Net, ready: Ready, leaves: Sequence[Any]) -> None:
        self.net, self.ready, self.machine = net, ready, ready.machine
        self.number = net.calls
        self.links: Links = net.links
        graph = ready.graph
        named = {name: leaf for name, leaf in zip(graph.inputs, leaves, strict=True) if name}
        _check_parts(named, self.machine, self.links)
        self.given = {
            name: Given(leaf.tensor, leaf.box)
            if isinstance(leaf, Part)
            else Given(leaf, Box.whole(graph.shape(name)))
            for name, leaf in named.items()
        }
        self.state = {name: get() for name, get in ready.state.items()}
        self.with_grad = torch.is_grad_enabled()
        wanted = {
            **{name: given.tensor for name, given in self.given.items()},
            **{n: t for n, t in self.state.items() if graph.values[n].kind == "parameter"},
        }
        self.leaves = {
            name: tensor
            for name, tensor in wanted.items()
            if self.with_grad and tensor.requires_grad
        }
        self.run_state: Run | None = None

    def _run(self) -> Run:
        first = next((g.tensor for g in self.given.values()), None)
        device = torch.device("cpu") if first is None else first.device
        return Run(
            program=self.machine.program,
            links=self.links,
            dtypes=self.machine.dtypes(device),
            carriers=self.machine.carriers(frozenset(self.leaves)),
            given=self.given,
            seed=self.net.seed,
            step=self.number,
            torch_device=device,
            autocast=_autocast(device),
        )

    def _held(self) -> dict[str, Tensor]:
        held = {name: tensor.detach() for name, tensor in self.state.items()}
        for name, given in self.given.items():
            held[name] = given.tensor.detach()
        return held

    def run(self) -> list[Any]:
        """Forward; gives the outputs of the model in order."""
        if self.leaves:
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
        run = self._run()
        with torch.no_grad():
            values = self.machine.forward(run, self._held())
            names = [a.name for a in self.ready.graph.outputs if isinstance(a, Ref)]
            outputs = tuple(values[name] for name in names)
            if self.net._nan == "raise" and any(
                t.is_floating_point() and bool(t.isnan().any()) for t in outputs
            ):
                raise self.machine.find_nan(self._run(), self._held())
            for target, name in self.ready.graph.mutations.items():
                self.ready.changing[target]().copy_(values[name])
        if not run.carriers:
            run.held.clear()
        self.run_state = run
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Backward; gives the gradients of parameters and inputs once all devices agree."""
        run = self.run_state
        if run is None:
            raise RunError(
                "backward ran through this call of net already. Add the losses up and call "
                "backward once; retain_graph=True is not supported through a net."
            )
        self.run_state = None
        recorder = self.links.recorder
        if recorder is not None:
            recorder.call, recorder.phase = self.number, "backward"
        names = [a.name for a in self.ready.graph.outputs if isinstance(a, Ref)]
        known: dict[str, Tensor] = {}
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                known[name] = known[name] + grad if name in known else grad
        self._open_backward(known)
        with torch.no_grad():
            found = self.machine.backward(run, known)
        self._commit(found)
        if recorder is not None:
            recorder.memory()
            recorder.flush()
        return found

    def _open_backward(self, known: Mapping[str, Tensor]) -> None:
        sums, tolerance = digest(list(known.values()))
        subject = fingerprint(sorted(known), self.number)
        note = Note(BACKWARD, self.net.commits, subject, sums, tolerance=tolerance)
        self.links.where = "the agreement before a backward pass"
        story = f"backward of call {self.number}, gradients for {', '.join(sorted(known))}"
        compare(self.links, note, explain=story)

    def _commit(self, found: Mapping[str, Tensor]) -> None:
        bad = ""
        if self.net._nan == "raise":
            bad = next((name for name, grad in found.items() if bool(grad.sum().isnan())), "")
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
        self.net.commits += 1


class Node(torch.autograd.Function):
    """The one node that a call of net is in the user's graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.names = call, names
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
        return (None, None, *(found.get(name) for name in ctx.names))


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


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

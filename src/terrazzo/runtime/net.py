"""Net: a model spread over devices that looks like the model.

One call of a net is one node of the user's autograd graph. Inside, forward and backward run
through the steps of a program; gradients and new buffers are staged, and become visible only when
all devices have agreed.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from terrazzo.errors import RunError, TerrazzoError, UsageError
from terrazzo.geometry import Box
from terrazzo.graph.export import Export
from terrazzo.records import Graph, Plan
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import FORWARD, NOTHING, Note, compare, digest
from terrazzo.runtime.alignment import align_weights
from terrazzo.runtime.allocator import trim
from terrazzo.runtime.call import Ready
from terrazzo.runtime.change import change_plan, keep_pace, tell_outgrown, tell_pace
from terrazzo.runtime.cut import Home
from terrazzo.runtime.inventory import Inventory
from terrazzo.runtime.links import Links, in_words
from terrazzo.runtime.machine import Machine
from terrazzo.runtime.pace import Pace
from terrazzo.runtime.part import Part
from terrazzo.runtime.plans import Plans
from terrazzo.runtime.recovery import together
from terrazzo.runtime.shipping import export_together, ship
from terrazzo.runtime.story import autocast, outline, story
from terrazzo.runtime.turn import Turn, relaid
from terrazzo.runtime.weights import Weights
from terrazzo.schedule import Program, lower


class Net(nn.Module):
    """Made by ``tz.parallelize``; parameters, buffers and state_dict names are the model's own."""

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        plans: Plans,
        *,
        seed: int,
        nan: str,
        align_every: int,
        lean: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__.update(
            _model=model, _links=links, _plans=plans, _ready={}, _exports={}, _nan=nan,
            _align_every=align_every, _example=(), _weights=Weights(model, links),
            _begun=weakref.WeakSet(), _known=None, _lean=lean, _pace=Pace(), _regrouped=False,
            _planned_for=links.devices, _trial=None, _trained=[],
        )  # fmt: skip
        if links.recovery is not None:
            links.recovery.followers.add(self)
        links.nets += 1
        self.number = links.nets
        """The same on all devices, for what they tell each other about this net."""
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
        if not self.homes:
            copied: nn.Module = copy.deepcopy(self._model, memo)
            return copied
        state = self.state_dict()
        with self._weights.shown_whole():
            copied = copy.deepcopy(self._model, memo)
        copied.load_state_dict(state, assign=True)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A saved net is its model, and loads without Terrazzo."""
        return operator.itemgetter(0), ((self._model,),)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole weights under the model's names; with cut weights, all devices must ask."""
        with self._careful():
            whole = self._weights.gathered(self.place)
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, tensor in whole.items():
            found[prefix + name] = tensor
        return found

    def place(self) -> None:
        """Weights that lost parts come back, where a plan for the devices of now wants them."""
        if self._weights.homes is None and self._example:
            leaves, tree = self._example
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            self.prepare(args, kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign and self.homes:
            raise UsageError(
                f"the weight {next(iter(self.homes))} is cut over the devices, and assign=True "
                "would put whole ones in the places of parts: load without it"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.homes:
            raise UsageError(
                f"the weight {next(iter(self.homes))} is cut over the devices: give the model its "
                "precision and its place (.double(), .to(...)) before tz.parallelize"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._weights.parts(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def homes(self) -> Mapping[str, Home]:
        """The weights that are cut, by name, and where their parts live."""
        return self._weights.homes or {}

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
            changed = together(self._links, self._aligned)
        self.realigned += changed
        return changed

    def _aligned(self) -> int:
        self.place()
        return align_weights(self._model, self._links, self._weights.kept or {})

    def change_plan(self, plan: Plan, *optimizers: Optimizer) -> None:
        """Goes on by another plan; all devices call this with the same plan, between two steps.

        Cut weights move to where the plan wants them, with their gradients and with all that these
        optimisers keep for them. The parameters stay the same objects, the numbers the same bits.
        """
        with self._careful():
            change_plan(self, plan, optimizers)

    def keep_pace(self, *optimizers: Optimizer) -> bool:
        """Keeps the plan the fastest one: in the first steps by trying those that promise about as
        much, later by planning anew where a device computes at another rate than planned.

        All devices call this as the last thing in every step, with the optimisers: what was fed for
        one plan does not go by another. As long as all keep the pace, nothing happens after the
        first steps. Gives whether the plan has changed.
        """
        with self._careful():
            return keep_pace(self, optimizers)

    @property
    def is_settled(self) -> bool:
        """Whether no other plan is left that ``keep_pace`` would try."""
        return not self._plans.contenders if self._trial is None else self._trial.is_over

    def follow(self, kept: Sequence[int | None]) -> None:
        """Other devices are here from now on: plans are made anew when they are next needed."""
        self._weights.follow(kept)
        self._ready.clear()
        if list(kept) != list(range(self._planned_for)):
            self._plans.follow(kept)
            self.__dict__.update(_pace=Pace(), _planned_for=len(kept), _trial=None)
            self._links.trying = None
        self.__dict__["_regrouped"] = True

    # ---- getting ready ------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Ready:
        """Exports and plans for inputs like these, unless that was done before."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        return self._prepared(leaves, tree, self._key(leaves, tree))

    def _prepared(
        self, leaves: Sequence[Any], tree: pytree.TreeSpec, inputs: tuple[object, ...]
    ) -> Ready:
        key = (inputs, self._known.modules)
        ready: Ready | None = self._ready.pop(key, None)
        if ready is None:
            known: Export | None = self._exports.get(key)
            if known is None or self._links.epoch:
                self._exports[key] = self._exported(leaves, tree, known)
            graph = self._exports[key].graph
            ready = self._make_ready(self._exports[key], self._lowered(graph, self._plans(graph)))
        self._ready[key] = ready  # the latest is last
        if not self._example:
            self.expect(*pytree.tree_unflatten(leaves, tree))
        return ready

    def expect(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        """Inputs will be like these."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        self.__dict__["_example"] = ([outline(leaf) for leaf in leaves], tree)

    def prepare_again(self, ready: Ready) -> Ready:
        """The same graph, ready for the devices that are here now."""
        graph = ready.graph
        latest: Ready | None = None
        for key, export in self._exports.items():
            if export.graph.digest == graph.digest:
                latest = self._ready.get(key)
                if latest is None:
                    program = self._lowered(graph, self._plans(graph))
                    latest = self._ready[key] = self._make_ready(export, program)
                break
        assert latest is not None, "a graph that was called is kept"
        return latest

    def relaid(self, ready: Ready, leaves: Sequence[Any]) -> list[Any]:
        """Inputs of a call, as the plan of the devices that are here now wants them."""
        return relaid(self, ready, leaves)

    def _exported(
        self, leaves: Sequence[Any], tree: pytree.TreeSpec, known: Export | None
    ) -> Export:
        """Made together; where members have changed, some may hold it already."""
        same = Note(FORWARD, self.calls, fingerprint(self._key(leaves, tree)), NOTHING)
        flag = float(known is not None)
        note = replace(same, flag=flag)
        flags = compare(self._links, note, explain=lambda: f"preparing for {story(leaves, self)}")
        if any(flags):
            return known if all(flags) and known else ship(known, self._links, flags.index(1.0))
        examples = [leaf.example() if isinstance(leaf, Part) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(examples, tree)
        with self._weights.shown_whole():
            return export_together(
                self._model, self._links, args=args, kwargs=kwargs, lean=self._lean
            )

    def _make_ready(self, exported: Export, program: Program) -> Ready:
        cuts = {name: [str(box) for box in boxes] for name, boxes in program.homes.items()}
        subject = fingerprint(program.plan.to_json(), cuts)
        note = Note(FORWARD, self.calls, subject, NOTHING)
        compare(self._links, note, explain=f"plan {subject} for graph {exported.graph.digest}")
        tree_out = pytree.treespec_loads(exported.graph.output_tree)
        changing = {target: self._owned(target, "buffer") for target in exported.graph.mutations}
        if self._weights.homes is None:
            self._weights.cut(self._weights.wanted(program))
        machine = Machine(program, self._links)
        trim()  # what exporting used and whole weights that were cut lie idle
        return Ready(exported, machine, tree_out, self._state(exported), changing)

    def _lowered(self, graph: Graph, plan: Plan, *, anew: bool = False) -> Program:
        """The first graph decides where weights live; later ones take them from there.

        ``anew``: this one decides again.
        """
        weights = self._weights
        if weights.homes is not None and not anew:
            return lower(graph, plan, weights.kept)
        program = lower(graph, plan)
        wanted = weights.wanted(program)
        return program if len(wanted) == len(program.homes) else lower(graph, plan, wanted)

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
        return described, str(tree), self._inventory().digest

    def _inventory(self) -> Inventory:
        """The model as it is now."""
        known: Inventory | None = self._known
        if known is None or not known.holds():
            known = self.__dict__["_known"] = Inventory(self._model, known)
        return known

    def boxes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Box, ...]]:
        """For inputs of these shapes (of the precision of the example), what each device needs."""
        leaves, tree = self._example
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Part))]
        if len(shapes) > len(places):
            raise UsageError(f"this net takes {len(places)} tensors, {len(shapes)} were fed")
        examples = list(leaves)
        for place, shape in zip(places, shapes, strict=False):
            like = leaves[place]
            examples[place] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        args, kwargs = pytree.tree_unflatten(examples, tree)
        ready = self.prepare(args, kwargs)
        given, inputs = ready.machine.program.given, ready.graph.inputs
        whole = [(Box.whole(shape),) * self._links.devices for shape in shapes]
        return [given.get(inputs[p], w) for p, w in zip(places, whole, strict=False)]

    # ---- calling ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._careful():
            leaves, tree = pytree.tree_flatten((args, kwargs))
            self.calls += 1
            if self._links.recorder is not None:
                self._links.recorder.begin(self.calls, trains=self.training)
            return Turn(self, leaves, tree).run()

    def _open(self, leaves: Sequence[Any], key: tuple[object, ...]) -> None:
        """Before any work: all devices confirm that they make the same call."""
        links, trained = self._links, self._known.trained
        tell_outgrown(self, trained)
        if links.devices == 1:
            return
        due = self._align_every and self.training and self.calls % self._align_every == 0
        if (due or self._regrouped) and self._weights.homes is not None:
            self.realigned += align_weights(self._model, links, self._weights.kept or {})
            self.__dict__["_regrouped"] = False
        followed = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        context = (torch.is_grad_enabled(), autocast(leaves), self.seed)
        subject = fingerprint(key, trained, followed, context)
        whole = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fed = any(isinstance(leaf, Part) for leaf in leaves)
        sums, tolerance = digest([] if fed else whole)
        told = self._pace.tell()
        note = Note(FORWARD, self.calls, subject, sums, flag=told, tolerance=tolerance)
        links.where = "the agreement before a forward call"
        heard = compare(links, note, explain=lambda: f"call {self.calls}: {story(leaves, self)}")
        if self._pace.hear(heard, self._plans.foreseen):
            tell_pace(self)

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
                    in_words(error).partition("\n")[0],
                    stay=not isinstance(error, KeyboardInterrupt),  # who is stopped, all are
                )
            raise


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _foreseen_everywhere(error: BaseException) -> bool:
    """Errors that every device meets at the same place need no waking."""
    return isinstance(error, TerrazzoError)

"""A program made ready for this device, and its calls: forward through the steps, then back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from terrazzo.errors import NotANumber, UsageError
from terrazzo.runtime.allocator import Heap, Room, heap, keep_memory
from terrazzo.runtime.dtypes import infer_dtypes
from terrazzo.runtime.gradients import Buckets
from terrazzo.runtime.links import Links
from terrazzo.runtime.recorder import Recorder
from terrazzo.runtime.steps import (
    ArriveStep,
    CombineStep,
    ComputeStep,
    DeviceStep,
    ExchangeStep,
    MomentsStep,
    PassesStep,
    Run,
    SpreadStep,
    TakeStep,
)
from terrazzo.runtime.steps.step import Given
from terrazzo.schedule import (
    Arrive,
    Combine,
    Compute,
    Exchange,
    Passes,
    Program,
    Spread,
    Step,
    Take,
)
from terrazzo.schedule.gradient import differentiable, reached
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.lifetimes import Lifetimes
from terrazzo.schedule.memory import footprint
from terrazzo.schedule.sums import Circle, summed_bytes
from terrazzo.schedule.training import Training

UNRECORDED = contextlib.nullcontext()


class Machine:
    """One program on one device."""

    def __init__(self, program: Program, links: Links) -> None:
        self.program, self.links = program, links
        links.form_circles(circle for boxes in program.homes.values() for circle in sharers(boxes))
        self._carriers: dict[frozenset[str], frozenset[str]] = {}
        self._live: dict[tuple[frozenset[str], frozenset[str]], frozenset[str]] = {}
        self._dtypes: dict[object, Mapping[str, torch.dtype]] = {}
        self._sums: dict[frozenset[str], Mapping[Circle, int]] = {}
        self._lives = Lifetimes(program)
        self._drops = self._lives.forward_drops
        self._exchange: ExchangeStep | None = None
        self.steps = tuple(self._ready(i, step) for i, step in enumerate(program.steps))
        self._labels = _labels(program)
        self._rest = [
            tuple(set(names) - set(step.inputs if isinstance(step, ComputeStep) else ()))
            for step, names in zip(self.steps, self._drops, strict=True)
        ]
        """What is to be dropped after each step on the way forward that it has not taken out."""
        self._heap = heap() if any(group.passes for group in program.plan.groups) else None
        self._rooms: dict[frozenset[str], Room] = {}
        if self._heap is not None:
            self._heap.be_tidy()
        elif program.devices > 1:
            keep_memory()

    def _ready(self, index: int, step: Step) -> DeviceStep:
        program, device = self.program, self.links.device
        if isinstance(step, Take):
            return TakeStep(step)
        if isinstance(step, Exchange):
            self._exchange = ExchangeStep(step, program, device=device)
            return self._exchange
        if isinstance(step, Arrive):
            assert self._exchange is not None
            return ArriveStep(self._exchange)
        if isinstance(step, Spread):
            array = program.arrays[step.source]
            parameter = program.is_parameter(step.source)
            circle = None if array.boxes is None else sharers(array.boxes)[device]
            return SpreadStep(step, parameter=parameter, circle=circle)
        if isinstance(step, Combine) and step.reduction.combine == "moments":
            again = program.plan.groups[step.group].passes > 0
            return MomentsStep(index, step, program, device=device, again=again)
        if isinstance(step, Passes):
            return PassesStep(step, program, device=device)
        if isinstance(step, Combine):
            return CombineStep(index, step, program, device=device)
        assert isinstance(step, Compute)
        ready = ComputeStep(index, step, program, device=device, exports=self._lives.exports[index])
        ready.last_use = frozenset(self._drops[index])
        return ready

    def carriers(self, leaves: frozenset[str]) -> frozenset[str]:
        """The arrays that carry a gradient when these leaves do."""
        if leaves not in self._carriers:
            known = leaves & frozenset(self.program.arrays)
            self._carriers[leaves] = differentiable(self.program, known)
        return self._carriers[leaves]

    def _reached(self, carriers: frozenset[str], outputs: frozenset[str]) -> frozenset[str]:
        """The arrays that gradients of these outputs flow through."""
        key = (carriers, outputs)
        if key not in self._live:
            self._live[key] = reached(self.program, carriers, outputs)
        return self._live[key]

    def _room(self, own: Heap, carriers: frozenset[str]) -> Room:
        """Plans with passes are made for little memory: their steps keep to what they need.

        That is less where layers are frozen. What an optimiser keeps is there when a step begins.
        """
        if carriers not in self._rooms:
            values = self.program.graph.values.values()
            weights = [value for value in values if value.kind == "parameter"]
            frozen = frozenset(w.target for w in weights if carriers and w.name not in carriers)
            inputs = not carriers.isdisjoint(n for n in self.program.graph.inputs if n)
            training = Training(frozen=frozen, inputs=inputs)
            foot = footprint(self.program, self.links.device, training=training)
            self._rooms[carriers] = Room(own, foot.used_bytes - foot.weights_bytes)
        return self._rooms[carriers]

    def dtypes(self, device: torch.device) -> Mapping[str, torch.dtype]:
        """The dtype of every value in the running context: autocast is not in the graph."""
        kind = device.type
        key = (kind, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        if key not in self._dtypes:
            self._dtypes[key] = infer_dtypes(self.program.graph, autocast=bool(key[1]), kind=kind)
        return self._dtypes[key]

    def _span(self, label: tuple[str, str, int]) -> AbstractContextManager[None]:
        """Records how long a step takes and what it sends, if anybody records."""
        recorder = self.links.recorder
        if recorder is None or not label[0]:
            return UNRECORDED
        return self._recorded(recorder, label)

    @contextlib.contextmanager
    def _recorded(self, recorder: Recorder, label: tuple[str, str, int]) -> Iterator[None]:
        counters, (kind, name, group) = self.links.counters, label
        begin, sent, away_s = time.perf_counter(), counters.total_bytes, counters.away_s
        yield
        recorder.span(
            kind, name, begin, sent_bytes=counters.total_bytes - sent, group=group,
            away_s=counters.away_s - away_s,
        )  # fmt: skip

    def forward(self, run: Run, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All steps in order; gives the values the caller asked for, by name."""
        run.held.update(leaves)
        lean = bool(run.carriers)
        if self._heap is not None and run.torch_device.type == "cpu":
            run.room = self._room(self._heap, run.carriers).begin()
        held, timed = run.held, self.links.recorder is not None
        drops = self._rest if lean else self._lives.last_drops
        for step, label, names in zip(self.steps, self._labels, drops, strict=True):
            if run.room is not None:
                run.ease()
            if timed:
                with self._span(label):
                    step.forward(run)
            else:
                step.forward(run)
            for name in names:
                held.pop(name, None)
        run.watch({name: held[name] for name in self._lives.kept if name in held})
        return {value: run.held[array] for value, array in self.program.outputs.items()}

    def backward(self, run: Run, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All steps in reverse; gives the complete gradients of the leaves, by name."""
        self._check_unchanged(run)
        arrays = {value: self.program.outputs[value] for value in grads}
        run.live = self._reached(run.carriers, frozenset(arrays.values()))
        if run.live not in self._sums:
            self._sums[run.live] = summed_bytes(self.program, run.live)
        run.buckets = Buckets(self.links, self._sums[run.live])
        for value, grad in grads.items():
            if arrays[value] in run.carriers:
                run.add(arrays[value], grad)
        lives, timed = self._lives, self.links.recorder is not None
        for index in reversed(range(len(self.steps))):
            if lives.rebuilt_before[index]:
                for again in lives.rebuilt(index, run.live):
                    with self._span(self._labels[again]), run.precision():
                        self.steps[again].forward(run)
            if run.room is not None:
                run.ease()
            if timed:
                with self._span(self._labels[index]):
                    self.steps[index].backward(run)
            else:
                self.steps[index].backward(run)
            for name in lives.backward_drops[index]:
                run.held.pop(name, None)
        with self._span(("compute", "weight gradients", 0)):
            run.catch_up()
        with self._span(("sum", "weight gradients", -1)):
            for name, total in run.buckets.finish().items():
                run.add(name, total)
        for name, part in run.input_parts.items():
            run.add(name, self.links.sum(part))
        found = {n: grad for n, grad in run.grads.items() if n in run.live and self._is_leaf(n)}
        run.held.clear()
        run.saved.clear()
        run.grads.clear()
        return found

    def _check_unchanged(self, run: Run) -> None:
        """What is read again must still hold the same numbers."""
        watched, run.watched = run.watched, []  # from here on what is not needed is let go
        for name, tensor, version in watched:
            if tensor._version != version:
                value = self.program.graph.values[self.program.arrays[name].value]
                raise UsageError(
                    f"the {value.kind if value.kind != 'node' else 'value'} "
                    f"{value.target or value.name} was changed in place between net's forward and "
                    "backward, which needs it as it was. Call backward before optimizer.step(), "
                    "and give net a copy of what changes."
                )

    def _is_leaf(self, name: str) -> bool:
        return name in self.program.graph.values and name not in self.program.graph.producer

    def find_nan(self, run: Run, leaves: Mapping[str, Tensor]) -> NotANumber:
        """Runs forward once more, all devices together, to name where NaN first appears."""
        run.held.update(leaves)
        bad = [float(_has_nan(given.tensor)) for given in run.given.values()]
        everywhere = self.links.gather(torch.tensor([*bad, 0.0]), counted=False).amax(0)
        for name, flag in zip(run.given, everywhere.tolist(), strict=False):
            if flag:
                return NotANumber(f"the batch itself holds NaN (input {name!r}): look at the data")
        for index, step in enumerate(self.steps):
            step.forward(run)
            found = [
                name for name in self.program.steps[index].writes if _has_nan(run.held.get(name))
            ]
            flags = self.links.gather(torch.tensor([float(bool(found))]), counted=False)
            if bool(flags.any()):
                devices = [d for d, flag in enumerate(flags.flatten().tolist()) if flag]
                return NotANumber(
                    f"{_title(self.program, self.program.steps[index])} gives NaN on device"
                    f"{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}. Lower the "
                    'learning rate or look at the data; nan="allow" lets it pass as PyTorch does.'
                )
        return NotANumber("the model gave NaN once and not again when asked: look at its memory")


def _has_nan(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and bool(tensor.isnan().any())


def _labels(program: Program) -> list[tuple[str, str, int]]:
    """Kind, name and group of every step in the records.

    A gradient is summed after the group that used the value, and counts for it.
    """
    found, group = [], len(program.plan.groups) - 1
    for step in reversed(program.steps):
        group = (
            step.group if isinstance(step, (Compute, Passes, Combine, Exchange, Arrive)) else group
        )
        found.append((*_label(program, step), group))
    return found[::-1]


def _label(program: Program, step: Step) -> tuple[str, str]:
    """What a step is called in the records; steps that do next to nothing have no name."""
    if isinstance(step, (Exchange, Arrive)):
        return "exchange", f"group {step.group}"
    if isinstance(step, (Compute, Passes)):
        return "compute", _title(program, step)
    if isinstance(step, Combine):
        return "sum", _title(program, step)
    if isinstance(step, Spread) and not program.is_leaf(step.source):
        return "sum", f"gradient of {step.source}"
    return "", ""


def _title(program: Program, step: Step) -> str:
    if isinstance(step, Combine):
        return program.graph.nodes[step.node].title
    if isinstance(step, Compute):
        first, last = (program.graph.nodes[step.applies[i].node].title for i in (0, -1))
        return first if first == last else f"{first} .. {last}"
    if isinstance(step, Passes):
        return program.graph.nodes[step.nodes[-1]].title
    return f"the value {step.writes[0]!r}"


__all__ = ["Given", "Machine", "Run"]

"""A rehearsal: what the runtime itself takes of a device, from steps of a tiny network.

Between its operators a training step is Python: steps that begin and end, messages that are packed
and waited for, notes, gradients on their way to the model. How long that takes depends on the
device, on the versions of Python and torch, and on the runtime, which changes. So all devices train
a tiny network together, by the very steps that they train any other with. Of every kind of step the
processor time is taken, its operators (timed alone) and its messages are subtracted, and what
remains is the runtime's own:

    of a step          Compute, Exchange, Combine, ...
    of an operator     from a plan in which one Compute holds all of them
    of a weight        its optimiser, its way to and from the net's gradients
    of a call of net   all else

The last two come from two such networks, one with more weights than the other. Before a step that
computes or sends, something larger than a core's caches passes through them, as maps do in a step
of any other network: Python that is found in a cache takes less than half of its time.

A net on a GPU is rehearsed there. What is taken is the processor's time all the same: launching,
copying to and from the host, waiting for that. Its caches see no maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch import nn

from terrazzo.geometry import Box
from terrazzo.graph.export import Export
from terrazzo.graph.rules import Local, Read
from terrazzo.measure.accelerator import CPU
from terrazzo.measure.links import measure_message_s
from terrazzo.measure.stopwatch import Launches, processor_clock
from terrazzo.measure.timing import time_trial
from terrazzo.measure.trials import Trial
from terrazzo.planner import plan_graph
from terrazzo.planner.workload import of_local
from terrazzo.records import Graph, Node, Plan, Ref
from terrazzo.records.graph import Value
from terrazzo.records.profile import OPERATOR, SUMMED, DeviceProfile, Own
from terrazzo.runtime.arithmetic import full_float32
from terrazzo.runtime.links import Links
from terrazzo.runtime.machine import Machine
from terrazzo.runtime.net import Net
from terrazzo.runtime.steps import DeviceStep, Run
from terrazzo.schedule import Apply, Combine, Compute, Exchange, Program, Spread, Step
from terrazzo.schedule.sums import small_sum_messages

FEW_LAYERS, MANY_LAYERS, CHANNELS, ROWS, COLUMNS = 1, 5, 4, 4, 8
WARM, STEPS = 2, 2
PASSING_BYTES = 8 << 20
"""More than a core has for itself, and its part of what cores share."""
ONE_OUTPUT = '[1, {"type": null, "context": null, "children_spec": []}]'

COMPUTE = Compute.__name__
COLD = (COMPUTE, Combine.__name__, Exchange.__name__)

Key = tuple[str, str]
FORWARD, BACKWARD = "forward", "backward"


class Rehearsal:
    """Two networks ready to be trained; making them takes seconds that nobody has to time."""

    def __init__(self, links: Links, torch_device: torch.device = CPU) -> None:
        self.torch_device = torch_device
        self._few, self._many = (
            _Stage(links, count, torch_device=torch_device) for count in (FEW_LAYERS, MANY_LAYERS)
        )
        self._whole = _Stage(links, MANY_LAYERS, torch_device=torch_device, whole=True)

    def measure(self, message_s: float) -> Own:
        """Processor seconds, on this device; all devices call it at once."""
        with full_float32(self.torch_device):
            return self._measured(message_s)

    def _measured(self, message_s: float) -> Own:
        few, many = self._few.play(), self._many.play()
        whole = self._whole.play()
        steps = _Part(self._many, many, message_s).own_s(_Part(self._whole, whole, message_s))
        added = (MANY_LAYERS - FEW_LAYERS) * WEIGHTS_OF_A_LAYER
        weight_s = max(0.0, many.rest_s - few.rest_s) / added
        net_s = max(0.0, many.rest_s - MANY_LAYERS * WEIGHTS_OF_A_LAYER * weight_s)
        return Own(steps, net_s, weight_s)


def rehearsed(
    device: DeviceProfile, rehearsal: Rehearsal, links: Links, say: Callable[[str], None]
) -> DeviceProfile:
    """A measured device, with what the runtime takes of it; all devices call it at once."""
    say("the runtime's own part")
    own = rehearsal.measure(measure_message_s(links, rehearsal.torch_device))
    return replace(device, own=own.stretched(device.seconds_per_cpu_s))


# ---- the network ---------------------------------------------------------------------------------

WEIGHTS_OF_A_LAYER = 3


def tiny_model(layers: int) -> nn.Module:
    """Convolutions, norms and activations, as ``tiny_graph`` says."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        blocks += [convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    return nn.Sequential(*blocks).train()


def tiny_graph(layers: int, devices: int) -> Graph:
    """What exporting ``tiny_model`` with its loss would give, without the minute it would take."""
    shape = (1, CHANNELS, ROWS * devices, COLUMNS)
    values = [Value("x", "input", shape, "float32")]
    nodes: list[Node] = []
    mutations: dict[str, str] = {}
    last = "x"
    for layer in range(layers):
        first, norm = str(3 * layer), str(3 * layer + 1)
        weight = (CHANNELS, CHANNELS, 3, 3)
        values.append(Value(f"w{layer}", "parameter", weight, "float32", f"{first}.weight"))
        for name, kind, target in (
            ("scale", "parameter", "weight"), ("shift", "parameter", "bias"),
            ("mean", "buffer", "running_mean"), ("var", "buffer", "running_var"),
        ):  # fmt: skip
            values.append(Value(f"{name}{layer}", kind, (CHANNELS,), "float32", f"{norm}.{target}"))
        values += [Value(f"{name}{layer}", "node", shape, "float32") for name in ("c", "n", "r")]
        values += [Value(f"{n}{layer}", "node", (CHANNELS,), "float32") for n in ("nm", "nv")]
        how = ((1, 1), (1, 1), (1, 1), 1)
        read = tuple(Ref(f"{name}{layer}") for name in ("c", "scale", "shift", "mean", "var"))
        made = (f"n{layer}", f"nm{layer}", f"nv{layer}")
        flops = 2 * prod(shape) * CHANNELS * 9
        nodes += [
            Node("aten.conv2d.default", (Ref(last), Ref(f"w{layer}"), None, *how), (f"c{layer}",),
                 first, flops),
            Node("terrazzo.batch_norm", (*read, 0.1, 1e-5), made, norm, prod(shape)),
            Node("aten.relu.default", (Ref(f"n{layer}"),), (f"r{layer}",), "", prod(shape)),
        ]  # fmt: skip
        mutations[f"{norm}.running_mean"], mutations[f"{norm}.running_var"] = made[1:]
        last = f"r{layer}"
    values += [Value("square", "node", shape, "float32"), Value("loss", "node", (), "float32")]
    nodes.append(Node("aten.square.default", (Ref(last),), ("square",), "", prod(shape)))
    nodes.append(Node("aten.mean.default", (Ref("square"), None), ("loss",), "", prod(shape)))
    named = {value.name: value for value in values}
    return Graph(named, tuple(nodes), ("x",), (Ref("loss"),), mutations, ONE_OUTPUT)


class _Tiny(Net):
    """A net whose graph is known: exporting takes longer than all the rest."""

    def __init__(
        self, links: Links, layers: int, *, torch_device: torch.device, whole: bool
    ) -> None:
        self.__dict__["graph"] = tiny_graph(layers, links.devices)
        bare = cast(Links, _Bare(links))
        with torch.random.fork_rng(devices=[]):  # a script's own draws are not to change
            torch.manual_seed(0)
            model = tiny_model(layers).to(torch_device)
        super().__init__(model, bare, _Rows(whole), seed=0, nan="raise", align_every=0)

    def _exported(self, leaves: Sequence[Any], tree: Any, known: Export | None) -> Export:
        return Export(self.__dict__["graph"], {})


class _Bare:
    """Links as they are where nothing is made again: a rehearsal may be part of an operation."""

    recovery = None

    def __init__(self, links: Links) -> None:
        self._links, self.nets = links, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)


class _Rows:
    """A band of rows for each device, with an exchange at every operator that wants one.

    ``whole``: everything on every device instead, in one go.
    """

    foreseen = None
    contenders: tuple[Plan, ...] = ()

    def __init__(self, whole: bool) -> None:
        self._whole = whole

    def __call__(self, graph: Graph) -> Plan:
        count = graph.shape("x")[2] // ROWS
        if self._whole or count == 1:
            return plan_graph(graph, count, layout="whole", groups="one")
        return plan_graph(graph, count, layout=f"tiles:{count}x1", groups="each")

    def adopt(self, graph: Graph, plan: Plan, *, by_script: bool = True) -> None:
        """It stays as it is."""

    def again(self, slowness: Sequence[float]) -> Plan | None:
        return None

    def follow(self, kept: Sequence[int | None]) -> None:
        """Whoever is lost takes the rehearsal along."""

    def outgrown(self) -> int:
        return 0


# ---- playing it ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Played:
    """Processor seconds of a training step: by kind of step and way, and of all else."""

    spent_s: dict[Key, float]
    rest_s: float


class _Stage:
    def __init__(
        self, links: Links, layers: int, *, torch_device: torch.device, whole: bool = False
    ) -> None:
        self.device, self.torch_device = links.device, torch_device
        self.net = _Tiny(links, layers, torch_device=torch_device, whole=whole)
        shape = self.net.__dict__["graph"].shape("x")
        self._x = torch.linspace(-1, 1, prod(shape), device=torch_device).view(shape)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-6)
        self._ledger = _Ledger(torch_device)
        self._step()
        self.machine: Machine = next(iter(self.net._ready.values())).machine
        self.program: Program = self.machine.program
        self.machine.steps = tuple(
            _Timed(step, kind(plan, self.program), self._ledger)
            for step, plan in zip(self.machine.steps, self.program.steps, strict=True)
        )
        for _ in range(WARM):
            self._step()

    def play(self) -> _Played:
        self._ledger.spent_s.clear()
        for _ in range(STEPS):
            self._ledger.book(("rest", ""), self._step)
        found = {key: spent_s / STEPS for key, spent_s in self._ledger.spent_s.items()}
        return _Played(found, found.pop(("rest", "")))

    def _step(self) -> None:
        self._ledger.fill_caches()
        loss = self.net(self._x)
        self._ledger.fill_caches()
        torch.autograd.backward(loss)
        self._ledger.fill_caches()
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Ledger:
    """Books what calls take of the processor; a call inside of another counts once, for itself."""

    def __init__(self, torch_device: torch.device) -> None:
        self.spent_s: dict[Key, float] = {}
        self._inner_s = 0.0
        self._clock = processor_clock(torch_device)
        self._passing = torch.zeros(PASSING_BYTES // 4 if torch_device.type == CPU.type else 0)

    def fill_caches(self) -> None:
        self.book(("passing", ""), lambda: self._passing.add_(1.0))

    def book(self, key: Key, call: Callable[[], object]) -> None:
        outer_s, self._inner_s = self._inner_s, 0.0
        begin_s = self._clock()
        call()
        took_s = self._clock() - begin_s
        self.spent_s[key] = self.spent_s.get(key, 0.0) + took_s - self._inner_s
        self._inner_s = outer_s + took_s


class _Timed:
    """A step of the runtime, timed; what it leaves to be done later counts for it too."""

    def __init__(self, step: DeviceStep, name: str, ledger: _Ledger) -> None:
        self._step, self._name, self._ledger = step, name, ledger

    def forward(self, run: Run) -> None:
        if self._name in COLD:
            self._ledger.fill_caches()
        self._ledger.book((self._name, FORWARD), lambda: self._step.forward(run))

    def backward(self, run: Run) -> None:
        if self._name in COLD:
            self._ledger.fill_caches()
        self._ledger.book((self._name, BACKWARD), lambda: self._step.backward(run))
        run.later[:] = [
            one if isinstance(one, _Later) else _Later(one, self._name, self._ledger)
            for one in run.later
        ]


class _Later:
    def __init__(self, call: Callable[[], None], name: str, ledger: _Ledger) -> None:
        self._call, self._name, self._ledger = call, name, ledger

    def __call__(self) -> None:
        self._ledger.book((self._name, BACKWARD), self._call)


# ---- what is the runtime's own -------------------------------------------------------------------


def kind(step: Step, program: Program) -> str:
    """How a step is called in a profile: one over whose gradient devices meet is another kind."""
    if isinstance(step, Spread) and not program.is_parameter(step.source):
        return SUMMED
    return type(step).__name__


class _Part:
    """What was played, less what operators and messages take of it."""

    def __init__(self, stage: _Stage, played: _Played, message_s: float) -> None:
        self._watch = Launches(stage.torch_device)
        self._timed: dict[tuple[str, object], tuple[float, float]] = {}
        self.counts: dict[str, int] = {}
        self.operators = 0
        self.left_s = dict(played.spent_s)
        program, device = stage.program, stage.device
        for step in program.steps:
            name = kind(step, program)
            self.counts[name] = self.counts.get(name, 0) + 1
            there, back = _messages(step, program, device)
            self._take(name, there * message_s, back * message_s)
            for trial in _trials(step, program, device):
                self._take(name, *self._seconds(trial))
            if isinstance(step, Compute):
                self.operators += len(step.applies)

    def _take(self, name: str, there_s: float, back_s: float) -> None:
        for way, seconds in ((FORWARD, there_s), (BACKWARD, back_s)):
            self.left_s[name, way] = self.left_s.get((name, way), 0.0) - seconds

    def _seconds(self, trial: Trial) -> tuple[float, float]:
        case = (trial.local.op, trial.load)
        if case not in self._timed:
            timing = time_trial(trial, self._watch)
            back_s = (timing.backward_input_s or 0.0) + (timing.backward_weight_s or 0.0)
            self._timed[case] = (timing.forward_s, back_s)
        return self._timed[case]

    def own_s(self, whole: _Part) -> dict[str, tuple[float, float]]:
        """By kind of step, and of an operator: from a plan where one Compute holds them all."""
        ways = (FORWARD, BACKWARD)
        found = {
            name: [max(0.0, self.left_s.get((name, way), 0.0)) / count for way in ways]
            for name, count in self.counts.items()
        }
        each = [max(0.0, whole.left_s.get((COMPUTE, way), 0.0)) / whole.operators for way in ways]
        if whole.counts[COMPUTE] < self.counts[COMPUTE]:
            inside = self.operators / self.counts[COMPUTE]
            pairs = zip(found[COMPUTE], each, strict=True)
            found[COMPUTE] = [max(0.0, step_s - inside * one_s) for step_s, one_s in pairs]
        else:
            found[COMPUTE] = [0.0, 0.0]
        found[OPERATOR] = each
        return {name: (there_s, back_s) for name, (there_s, back_s) in found.items()}


def _messages(step: Step, program: Program, device: int) -> tuple[float, float]:
    """Sent and received by this device, there and back."""
    everybody = small_sum_messages(program.devices)
    if isinstance(step, Combine):
        return everybody, 0
    if isinstance(step, Spread) and kind(step, program) == SUMMED:
        return 0, everybody
    if not isinstance(step, Exchange):
        return 0, 0
    ends = [(t.source, t.destination) for move in step.moves for t in move.transfers]
    count = sum(device in pair and pair[0] != pair[1] for pair in ends)
    return count, count


def _trials(step: Step, program: Program, device: int) -> Iterator[Trial]:
    if isinstance(step, Compute):
        for apply in step.applies:
            yield from _trial(apply, program, device)
    elif isinstance(step, Combine) and (local := step.parts[device]) is not None:
        node = program.graph.nodes[step.node]
        if step.reduction.combine == "moments":
            yield from _tried(node, local, step.places[device], program)


def _trial(apply: Apply, program: Program, device: int) -> Iterator[Trial]:
    graph = program.graph
    node = graph.nodes[apply.node]
    if apply.locals is None:
        reads = tuple(Read(Box.whole(graph.shape(name))) for name in node.refs)
        whole = Box.whole(graph.shape(node.output))
        yield from _tried(node, Local(reads, node.op, node.args), whole, program)
    elif (local := apply.locals[device]) is not None:
        boxes = program.arrays[apply.outputs[0]].boxes
        assert boxes is not None
        yield from _tried(node, local, boxes[device], program)


def _tried(node: Node, local: Local, box: Box, program: Program) -> Iterator[Trial]:
    graph = program.graph
    load, values = of_local(local, box), [graph.values[name] for name in node.refs]
    if load is not None and all(value.is_floating for value in values):
        yield Trial(
            load, local, graph.shape(node.output), box, tuple(value.dtype for value in values),
            tuple(place for place, value in enumerate(values) if value.kind == "parameter"), 0.0,
        )  # fmt: skip

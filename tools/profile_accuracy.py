"""How true predictions are: boxes that no profile holds, and whole steps, against the clock.

python tools/profile_accuracy.py [--boxes 30] [--seed 0] [--seconds 25] [network ...]

For each network a profile is taken, then boxes of its products are drawn at random (tiles of any
size, slices of output or input channels), predicted, and timed. At the end a whole training step
of one device is predicted from the same profile and run. One thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import terrazzo as tz
from terrazzo.geometry import Box
from terrazzo.graph.export import export
from terrazzo.graph.rules import rule_for
from terrazzo.measure.device import Terms, measure_device
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.timing import smaller, time_trial
from terrazzo.measure.trials import INPUTS, OUTPUTS, Trial, cut_channels
from terrazzo.planner.rates import Rates
from terrazzo.planner.workload import of_local, of_node, padded
from terrazzo.records import Graph, Node
from terrazzo.records.profile import DeviceProfile
from terrazzo.zoo import build

SIDES = {"yolov2-front": 416, "resnet18": 224, "mobilenetv2": 224, "unet32": 256}
PRODUCTS = ("conv2d", "conv_transpose2d")
STEPS = 8


@dataclass(frozen=True)
class Gap:
    """One direction of one box: predicted and measured seconds."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", nargs="*", default=list(SIDES))
    parser.add_argument("--boxes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=25.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    everything: list[Gap] = []
    for name in options.network:
        model, x = build(name), torch.randn(1, 3, SIDES[name], SIDES[name])
        graph = export(model, (x,)).graph
        terms = Terms("here", 0, options.seconds)
        device = measure_device(graph, terms, lambda _: None)
        gaps = list(_gaps(graph, device, random.Random(options.seed), options.boxes))
        everything += gaps
        total = sum(g.predicted_s for g in gaps) / sum(g.measured_s for g in gaps) - 1
        predicted_s = _step_s(graph, device)
        plain_s = _real_step_s(model, x) * device.seconds_per_cpu_s
        net_s = _real_step_s(tz.parallelize(model, (x,)), x) * device.seconds_per_cpu_s
        print(
            f"{name:14} {len(device.timings)} sizes in {device.took_s:.1f} s, "
            f"{device.left_out} left out; boxes: {_spread(gaps)}, their sum {total:+.1%}; step "
            f"{predicted_s:.3f} s predicted, {plain_s:.3f} s in plain PyTorch "
            f"({predicted_s / plain_s - 1:+.1%}), {net_s:.3f} s wrapped",
            flush=True,
        )
        for gap in sorted(gaps, key=lambda gap: -abs(gap.error))[:3]:
            print(f"    {gap.error:+.0%} {gap.what}")
    print(f"all: {_spread(everything)}")


def _spread(gaps: list[Gap]) -> str:
    errors = sorted(abs(gap.error) for gap in gaps)
    high = errors[int(0.9 * len(errors))]
    return f"median error {statistics.median(errors):.1%}, nine in ten below {high:.1%}"


def _gaps(graph: Graph, device: DeviceProfile, drawn: random.Random, count: int) -> Iterator[Gap]:
    rates, watch = Rates(device), Stopwatch(1)
    known = {timing.load for timing in device.timings}
    trials = [t for t in _boxes(graph, drawn, count) if t.load not in known]
    first = [time_trial(trial, watch) for trial in trials]
    for trial, once in zip(trials, first, strict=True):
        seen = smaller(once, time_trial(trial, watch))  # as profiles are: of two the smaller
        found, padding_s = rates.seconds(trial.load), rates.padding_s(padded(trial.local))
        for what in ("forward_s", "backward_input_s", "backward_weight_s"):
            raw = getattr(seen, what)
            if raw:
                measured_s = raw * device.seconds_per_cpu_s
                more_s = 0.0 if what == "backward_weight_s" else padding_s
                yield Gap(f"{what} of {trial.load}", getattr(found, what) + more_s, measured_s)


def _boxes(graph: Graph, drawn: random.Random, count: int) -> Iterator[Trial]:
    nodes = [node for node in graph.nodes if node.op.split(".")[1] in PRODUCTS]
    made = 0
    while made < count:
        node = drawn.choices(nodes, [node.flops for node in nodes])[0]
        if drawn.random() < 0.5:
            box = _tile(graph.shape(node.output), drawn)
            rule = rule_for(node.op)
            assert rule is not None and rule.local is not None
            cut = (rule.local(node, graph, box), box)
        else:
            what, parts = drawn.choice((OUTPUTS, INPUTS)), drawn.choice((3, 4, 5, 8, 10))
            found = cut_channels(node, graph, what, parts)
            if found is None:
                continue
            cut = found
        made += 1
        yield _trial(node, graph, *cut)


def _tile(shape: tuple[int, ...], drawn: random.Random) -> Box:
    spans = [(0, shape[0]), (0, shape[1])]
    for extent, parts in ((shape[2], 10), (shape[3], 4)):
        size = drawn.randint(max(1, extent // parts), extent)
        low = drawn.randint(0, extent - size)
        spans.append((low, low + size))
    return Box(tuple(spans))


def _trial(node: Node, graph: Graph, local: object, box: Box) -> Trial:
    load = of_local(local, box)
    values = [graph.values[name] for name in node.refs]
    return Trial(
        load=load,
        local=local,
        shape=graph.shape(node.output),
        box=box,
        dtypes=tuple(value.dtype for value in values),
        weights=tuple(place for place, v in enumerate(values) if v.kind == "parameter"),
        rank=0.0,
    )


def _step_s(graph: Graph, device: DeviceProfile) -> float:
    """A step of one device that has the model to itself, operator by operator."""
    rates, total_s = Rates(device), 0.0
    for node in graph.nodes:
        load = of_node(node, graph)
        if load is None or not graph.values[node.output].is_floating:
            total_s += rates.call_s[0]
            continue
        from_input = any(name in graph.inputs for name in node.refs)
        total_s += rates.step_s(load, by_input=not from_input)
    return total_s


def _real_step_s(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Processor time of a step: memory has settled after a few."""
    found = []
    for _ in range(STEPS):
        begin_s = time.thread_time()
        out = model(x)
        torch.autograd.backward(out, torch.ones_like(out))
        found.append(time.thread_time() - begin_s)
        model.zero_grad()
    return min(found[2:])


if __name__ == "__main__":
    main()

"""What the exact core costs: overhead on one device, bytes, split shares, planning time."""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import terrazzo as tz
from terrazzo.bench import memory
from terrazzo.cluster import launch
from terrazzo.errors import RunError
from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
from terrazzo.records.units import parse_bytes
from terrazzo.schedule import lower, split_shares
from terrazzo.zoo import resnet18, resnet50


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured number; ``limit`` is what it must not exceed (or reach, if ``least``)."""

    what: str
    case: str
    value: float
    limit: float
    unit: str = ""
    least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    @property
    def text(self) -> str:
        return f"{self.value:.4g} {self.unit}".strip()

    @property
    def limit_text(self) -> str:
        return f"{'at least' if self.least else 'at most'} {self.limit:.4g} {self.unit}".strip()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Measure:
    what: str
    run: Callable[[], list[Finding]]


def measure_all() -> list[Measure]:
    return [
        Measure("overhead on one device", overhead),
        Measure("bytes sent against bytes predicted", payload),
        Measure("split shares", shares),
        Measure("export and planning", planning),
        Measure("recording spans", recording),
        Measure("one device with little memory", little_memory),
    ]


def _step_s(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    begin = time.perf_counter()
    torch.autograd.backward(F.cross_entropy(model(x), y))
    elapsed = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    return elapsed


def overhead(rounds: int = 15) -> list[Finding]:
    """The wrapped model beside the plain one, step by step in turns."""
    torch.manual_seed(0)
    plain = resnet18()
    x, y = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    net = tz.parallelize(copy.deepcopy(plain), (x,))
    _step_s(plain, x, y), _step_s(net, x, y)
    ratios = []
    for turn in range(rounds):
        order: Sequence[nn.Module] = (plain, net) if turn % 2 else (net, plain)
        seconds = {id(model): _step_s(model, x, y) for model in order}
        ratios.append(seconds[id(net)] / seconds[id(plain)])
    case = "ResNet-18, 224x224, batch 8"
    return [Finding("step time over plain PyTorch", case, statistics.median(ratios), 1.03, "x")]


def payload() -> list[Finding]:
    """One training step on local devices; their counters against the program's geometry."""
    findings = []
    for devices, layout, groups in ((2, "tiles:2x1", "each"), (4, "tiles:2x2", "4")):
        rows = _answer("terrazzo.bench.payload", layout, groups, devices=devices)
        case = f"ResNet-18 64x64, {devices} devices, {layout}, groups {groups}"
        gap = sum(abs(sent - predicted) for sent, predicted in rows)
        total = sum(sent for sent, _ in rows)
        what = f"difference from predicted, of {total} bytes"
        findings.append(Finding(what, case, gap, 0, "bytes"))
    return findings


def recording() -> list[Finding]:
    """What a record of every span takes of a short step."""
    share = _answer("terrazzo.bench.spans", devices=2)
    case = "small YOLOv2, 320x320, batch 4, 2 devices"
    return [Finding("share of a step spent on its record", case, share, 0.01)]


def _answer(module: str, *arguments: str, devices: int) -> Any:
    """What device 0 of a benchmark on local devices writes down."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, str(answer), *arguments]
        lines: list[str] = []
        result = launch(command, devices, output=lambda _, line: lines.append(line))
        if result.failure is not None:
            raise RunError(f"{module} failed: " + "\n".join(lines[-5:]))
        return json.loads(answer.read_text())


def shares() -> list[Finding]:
    findings = []
    for name, model in (("ResNet-18", resnet18()), ("ResNet-50", resnet50())):
        graph = export(model, (torch.randn(2, 3, 224, 224),)).graph
        plan = plan_graph(graph, 6, layout="tiles:3x2", groups="each")
        share = split_shares(lower(graph, plan))
        for what, value in (("FLOPs", share.flops), ("activation bytes", share.bytes)):
            findings.append(
                Finding(f"{what} that run split", name, value * 100, 95, "%", least=True)
            )
    return findings


def planning() -> list[Finding]:
    model, x = resnet50(), torch.randn(2, 3, 224, 224)
    begin = time.perf_counter()
    graph = export(model, (x,)).graph
    lower(graph, plan_graph(graph, 6, layout="tiles:3x2", groups="each"))
    seconds = time.perf_counter() - begin
    case = f"ResNet-50, {len(graph.nodes)} operators, 6 devices"
    return [Finding("export and planning", case, seconds, 10, "s")]


def little_memory() -> list[Finding]:
    """Peak above idle and time of a step under a limit, against plain PyTorch."""
    plain, less = memory.run(""), memory.run(memory.LIMIT)
    case = f"U-Net 32, {memory.SIZE}x{memory.SIZE}, batch 1, memory={memory.LIMIT}"
    peak, limit = less["peak_bytes"] / memory.MIB, parse_bytes(memory.LIMIT) / memory.MIB
    share = less["peak_bytes"] / plain["peak_bytes"]
    times = less["step_s"] / plain["step_s"]
    return [
        Finding("peak memory above idle", case, peak, limit, "MiB"),
        Finding("peak memory over plain PyTorch", case, share, 1 / 3),
        Finding("step time over plain PyTorch", case, times, 1.5, "x"),
    ]

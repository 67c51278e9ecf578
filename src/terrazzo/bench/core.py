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
from terrazzo.cluster import launch
from terrazzo.errors import RunError
from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
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
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "bytes.json"
            command = [sys.executable, "-m", "terrazzo.bench.payload", str(answer), layout, groups]
            lines: list[str] = []
            result = launch(command, devices, output=lambda _, line: lines.append(line))  # noqa: B023
            if result.failure is not None:
                raise RunError("the payload benchmark failed: " + "\n".join(lines[-5:]))
            rows = json.loads(answer.read_text())
        case = f"ResNet-18 64x64, {devices} devices, {layout}, groups {groups}"
        gap = sum(abs(sent - predicted) for sent, predicted in rows)
        total = sum(sent for sent, _ in rows)
        what = f"difference from predicted, of {total} bytes"
        findings.append(Finding(what, case, gap, 0, "bytes"))
    return findings


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

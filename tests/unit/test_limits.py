"""Memory limits of devices, one by one, and the plan with the least memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.fitting import TooLittleMemory, fit, tightest
from terrazzo.planner.limits import SLOWER, spread_limit, within
from terrazzo.planner.search import MEMORY, search
from terrazzo.records import Graph
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprint

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile

MIB = 1 << 20


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Large maps behind norms, then channels: much to keep, and little to compute again."""
    layers: list[nn.Module] = []
    for wide, thin in ((3, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(wide, thin, 3, padding=1), nn.BatchNorm2d(thin), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Conv2d(32, 8, 3, padding=1)]
    return export(nn.Sequential(*layers), (torch.randn(2, 3, 384, 384),)).graph


def needs(graph: Graph, plan: object) -> list[int]:
    program = lower(graph, plan)  # type: ignore[arg-type]
    return [footprint(program, device).total_bytes for device in range(program.devices)]


class TestLimits:
    def test_one_for_all_or_one_for_each(self) -> None:
        assert spread_limit(7, 3) == (7, 7, 7)
        assert spread_limit((1, 2), 2) == (1, 2)
        assert spread_limit(None, 2) is None
        with pytest.raises(PlanError, match="2 memory limits were given for 3 devices"):
            spread_limit((1, 2), 3)

    def test_words_of_a_user(self) -> None:
        assert Wishes(memory="700MiB").memory_bytes == 700 * MIB
        assert Wishes(memory="700MiB,3GiB").memory_bytes == (700 * MIB, 3072 * MIB)
        assert Wishes(memory=["700MiB", 5 * MIB]).memory_bytes == (700 * MIB, 5 * MIB)
        with pytest.raises(UsageError, match="amount of memory"):
            Wishes(memory="700MiB,much")

    def test_only_the_small_device_makes_passes(self, graph: Graph) -> None:
        plan = plan_graph(graph, 2, layout="tiles:2x1", groups="auto")
        one, other = needs(graph, plan)
        assert fit(graph, plan, (one, other)) is plan
        limits = (one, int(0.6 * other))
        found = fit(graph, plan, limits)
        assert found != plan
        assert within(needs(graph, found), limits)
        assert tightest(graph, plan, limits).device == 1

    def test_a_refusal_names_the_device_and_what_would_do(self, graph: Graph) -> None:
        plan = plan_graph(graph, 2, layout="tiles:2x1", groups="auto")
        with pytest.raises(TooLittleMemory, match=r"on board-1, limit 12.0 MiB") as refused:
            fit(graph, plan, (900 * MIB, 12 * MIB), names=("board-0", "board-1"))
        assert refused.value.missing_bytes > 0
        advised = Wishes(memory=str(refused.value).split('memory="')[1].split('"')[0]).memory_bytes
        assert isinstance(advised, int)
        assert within(needs(graph, fit(graph, plan, (900 * MIB, advised))), (900 * MIB, advised))


class TestSearch:
    def test_a_small_board_beside_a_large_one(self, graph: Graph) -> None:
        cluster = profile(2)
        free = search(graph, cluster)
        most = max(free.best.prediction.memory_bytes)
        limits = (int(0.7 * most), 4 * most)
        found = search(graph, cluster, memory_bytes=limits)
        assert within(found.best.prediction.memory_bytes, limits)
        assert found.best.prediction.step_s >= free.best.prediction.step_s

    def test_least_memory_has_passes_and_keeps_pace(self, graph: Graph) -> None:
        cluster = profile(2)
        fast, small = search(graph, cluster), search(graph, cluster, objective=MEMORY)
        assert any(group.passes for group in small.best.plan.groups)
        assert max(small.best.prediction.memory_bytes) < 0.7 * max(
            fast.best.prediction.memory_bytes
        )
        tried = [fast.best, *small.rejected]
        fastest_s = min(t.prediction.step_s for t in tried)
        assert small.best.prediction.step_s <= SLOWER * max(fastest_s, fast.best.prediction.step_s)

"""The search: plans as good as exhaustive search finds, sane on odd clusters, within limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from terrazzo.errors import PlanError
from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
from terrazzo.planner.borders import ends
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import group_title
from terrazzo.planner.layouts import alone, candidates, shares
from terrazzo.planner.prices import Prices
from terrazzo.planner.search import Found, Walk, search, tidy
from terrazzo.planner.stretch import Ground, price
from terrazzo.records import Graph, Group, Layout, Plan
from terrazzo.records.profile import Profile
from terrazzo.schedule import lower

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile


@cache
def mixed(batch: int = 1) -> Graph:
    """Large maps with few weights first, small maps with many weights last."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1),
    )  # fmt: skip
    return export(model, (torch.zeros(batch, 3, 256, 256),)).graph


@cache
def small() -> Graph:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 128, 3, padding=1),
    )  # fmt: skip
    return export(model, (torch.zeros(2, 3, 32, 32),)).graph


@cache
def deep() -> Graph:
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *layers, nn.AdaptiveAvgPool2d(1))
    return export(model, (torch.zeros(4, 3, 384, 384),)).graph


def kinds(found: Found) -> list[str]:
    return [group.layout.letters for group in found.best.plan.groups]


def every_plan(graph: Graph, devices: int, layouts: Sequence[Layout]) -> Iterator[Plan]:
    """Every choice of ends among those there are, and of layouts."""
    places = ends(graph)
    for chosen in product((False, True), repeat=len(places) - 1):
        stops = [p for p, take in zip(places[:-1], chosen, strict=True) if take] + places[-1:]
        for layout in product(layouts, repeat=len(stops)):
            begins = [0, *(stop + 1 for stop in stops[:-1])]
            yield Plan(
                graph.digest,
                devices,
                tuple(
                    Group(graph.nodes[stop].output, one, group_title(graph, begin, stop))
                    for begin, stop, one in zip(begins, stops, layout, strict=True)
                ),
            )


def every_passes(plan: Plan) -> Iterator[Plan]:
    """The plan with and without passes in each of its groups."""
    for passes in product((0, 4), repeat=len(plan.groups)):
        groups = zip(plan.groups, passes, strict=True)
        yield replace(plan, groups=tuple(replace(group, passes=p) for group, p in groups))


class TestExhaustive:
    @pytest.mark.parametrize("rate", [10.0, 94.0, 1000.0])
    def test_nothing_is_much_better_than_what_is_found(self, rate: float) -> None:
        cluster = profile(2, mbit_per_s=rate)
        prices = Prices(cluster)
        layouts = [
            *map(Layout.parse, ("tiles:2x1", "samples:2", "channels:2", "whole")), alone((1, 1)),
        ]  # fmt: skip
        found = search(small(), cluster).best.prediction.step_s
        least = min(
            predict(lower(small(), plan), prices, memory=False).step_s
            for plan in every_plan(small(), 2, layouts)
        )
        assert found <= 1.03 * least

    @pytest.mark.parametrize(
        ("speed", "layouts"),
        [
            ((12e9, 4e9), ("tiles:24,8x1", "channels:24,8", "channels:2", "whole")),
            ((8e9, 8e9, 2e8), ("tiles:3x1", "tiles:1,1,0x1", "channels:1,1,0", "whole")),
        ],
    )
    def test_uneven_devices_and_some_of_them(
        self, speed: tuple[float, ...], layouts: tuple[str, ...]
    ) -> None:
        cluster = profile(speed)
        prices = Prices(cluster)
        least = min(
            predict(lower(small(), plan), prices, memory=False).step_s
            for plan in every_plan(small(), len(speed), [*map(Layout.parse, layouts)])
        )
        assert search(small(), cluster).best.prediction.step_s <= 1.03 * least

    def test_within_limits_with_passes_in_some_groups(self) -> None:
        """Every choice of ends, of two layouts and of passes: limits that few plans keep."""
        cluster = profile(2)
        prices = Prices(cluster)
        known = [
            predict(lower(small(), plan), prices)
            for one in every_plan(small(), 2, [Layout.parse("samples:2"), Layout.channels(2)])
            for plan in every_passes(one)
        ]
        needs = sorted(max(one.memory_bytes) for one in known)
        for part in (0.05, 0.1, 0.5):
            limit = needs[int(part * len(needs))]
            least = min(one.step_s for one in known if max(one.memory_bytes) <= limit)
            found = search(small(), cluster, memory_bytes=limit).best.prediction
            assert max(found.memory_bytes) <= limit
            assert found.step_s <= 1.06 * least

    @pytest.mark.parametrize("latency_s", [1e-4, 1e-2])
    def test_in_a_given_layout_the_best_borders_are_found(self, latency_s: float) -> None:
        cluster, layout = profile(4, latency_s=latency_s), Layout.tiles(2, 2)
        found = search(deep(), cluster, layout=layout).best
        assert {group.layout for group in found.plan.groups} == {layout}
        prices = Prices(cluster)
        least = min(
            predict(lower(deep(), plan), prices, memory=False).step_s
            for plan in every_plan(deep(), 4, [layout])
        )
        assert found.prediction.step_s <= 1.01 * least

    @pytest.mark.parametrize("felt", [0.0, 0.5, 1.0])
    def test_the_walk_finds_the_cheapest_of_its_own_sums(self, felt: float) -> None:
        layouts = [Layout.tiles(2, 1), Layout.channels(2), Layout()]
        walk = Walk(small(), Prices(profile(2)), layouts)
        found = self.own_cost(walk, walk.plan(felt), felt)
        plans = every_plan(small(), 2, layouts)
        assert found == pytest.approx(min(self.own_cost(walk, plan, felt) for plan in plans))

    def own_cost(self, walk: Walk, plan: Plan, felt: float) -> float:
        total, begin, before = 0.0, 0, -1
        for group in plan.groups:
            stop = walk.ends.index(walk.graph.producer[group.last])
            number = walk.layouts.index(group.layout)
            run = walk._runs[begin, stop, number]
            total += run.work_s + felt * run.sums_s
            if begin:
                total += walk._moves[begin, stop, number][before]
            begin, before = stop + 1, number
        return total + walk._ending_s(before)


class TestChoice:
    def test_tiles_for_large_maps_channels_for_large_weights(self) -> None:
        found = search(mixed(), profile(4))
        letters = kinds(found)
        assert "h" in letters[0]
        assert "c" in letters[-1]
        fixed_s = Prices(profile(4)).net_s(0, 0)  # whatever the plan
        uniform = [t.prediction.step_s - fixed_s for t in found.rejected if "everywhere" in t.name]
        assert found.best.prediction.step_s - fixed_s < 0.97 * min(uniform)

    def test_images_are_spread_where_weights_are_small_and_images_many(self) -> None:
        layers = [nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, 32, 3), *layers, nn.AdaptiveAvgPool2d(1))
        found = search(export(model, (torch.zeros(4, 3, 128, 128),)).graph, profile(4))
        assert set(kinds(found)) == {"n"}
        assert len(found.best.plan.groups) == 1

    def test_never_slower_than_one_device(self) -> None:
        for rate in (0.1, 1.0, 94.0):
            found = search(mixed(), profile(3, mbit_per_s=rate))
            single = plan_graph(mixed(), 1, layout="whole", groups="one")
            limit = predict(lower(mixed(), single), profile(1)).step_s
            notes_s = 3 * Prices(profile(3, mbit_per_s=rate)).notes_s(128)
            assert found.best.prediction.step_s <= limit + notes_s

    def test_over_very_slow_links_nothing_is_sent(self) -> None:
        """Each device computes everything, or one does and keeps a small result to itself."""
        found = search(mixed(), profile(3, mbit_per_s=0.05))
        assert {str(group.layout) for group in found.best.plan.groups} <= {"whole", "samples:1,0,0"}
        assert sum(found.best.prediction.sent_bytes) == 0

    def test_alone_is_the_fastest_device(self) -> None:
        assert alone((3.0, 9.0, 3.0)) == Layout.samples((0, 1, 0))

    def test_fast_devices_get_more(self) -> None:
        found = search(mixed(), profile((2e9, 8e9, 2e9, 8e9), mbit_per_s=10_000))
        even = search(mixed(), profile(4, mbit_per_s=10_000))
        assert any(len(set(cut)) > 1 for g in found.best.plan.groups for _, cut in g.layout.cuts)
        busy = found.best.prediction.compute_s
        assert max(busy) < 2 * min(busy), "2 and 8 GFLOP/s end nearly together"
        assert even.best.prediction.step_s < found.best.prediction.step_s

    def test_a_hopeless_device_is_left_out(self) -> None:
        found = search(mixed(4), profile((8e9, 8e9, 8e9, 1e7)))
        assert found.best.prediction.compute_s[3] < 0.2 * found.best.prediction.compute_s[0]
        three = search(mixed(4), profile(3)).best.prediction.step_s
        assert found.best.prediction.step_s < 1.5 * three

    def test_one_device_needs_no_search(self) -> None:
        found = search(mixed(), profile(1))
        assert found.best.plan.devices == 1
        assert not found.rejected

    def test_a_model_without_pictures_runs(self) -> None:
        graph = export(nn.Linear(64, 3), (torch.zeros(2, 64),)).graph
        assert search(graph, profile(2)).best.prediction.step_s > 0

    def test_a_model_with_skips_and_a_head(self) -> None:
        from terrazzo import zoo

        graph = export(zoo.build("resnet18"), (torch.zeros(2, 3, 64, 64),)).graph
        found = search(graph, profile(2))
        assert lower(graph, found.best.plan).plan == found.best.plan
        assert all(found.best.prediction.step_s <= t.prediction.step_s for t in found.rejected)

    def test_the_same_question_has_the_same_answer(self) -> None:
        cluster = Profile.from_json(profile(3).to_json())
        assert search(small(), cluster).best.plan == search(small(), profile(3)).best.plan


class TestMemory:
    @pytest.mark.parametrize("part", [0.9, 0.95])
    def test_a_limit_is_kept(self, part: float) -> None:
        """From what keeping everything takes on one device down to a part of it."""
        graph, cluster = deep(), profile(2)
        free = search(graph, cluster)
        limit = int(part * max(free.best.prediction.memory_bytes))
        tight = search(graph, cluster, memory_bytes=limit)
        assert max(tight.best.prediction.memory_bytes) <= limit
        assert tight.best.prediction.step_s >= free.best.prediction.step_s

    def test_what_cannot_fit_is_refused_with_numbers(self) -> None:
        with pytest.raises(PlanError, match=r"needs at least .* limit 2\.0 MiB"):
            search(mixed(), profile(2), memory_bytes=2 << 20)

    def test_the_least_memory_may_be_asked_for(self) -> None:
        quick = search(mixed(4), profile(4))
        lean = search(mixed(4), profile(4), objective="memory")
        assert max(lean.best.prediction.memory_bytes) <= max(quick.best.prediction.memory_bytes)
        for other in lean.rejected:
            assert max(lean.best.prediction.memory_bytes) <= max(other.prediction.memory_bytes)


class TestLayouts:
    def test_shares_follow_speeds(self) -> None:
        assert shares((5.0, 5.0)) == (1, 1)
        assert shares((8.0, 4.0, 0.0)) == (24, 12, 0)

    def test_grids_of_all_kinds_fit_the_devices(self) -> None:
        found = candidates(mixed(6), (1.0,) * 6)
        names = {str(layout) for layout in found}
        assert {"whole", "tiles:3x2", "samples:6", "channels:6", "samples:3+channels:2"} <= names
        assert all(layout.is_whole or layout.devices == 6 for layout in found)
        assert len(names) == len(found)

    def test_one_image_is_not_spread_by_images(self) -> None:
        spread = [one for one in candidates(mixed(), (1.0,) * 4) if "n" in one.letters]
        assert spread == [alone((1.0,) * 4)]

    def test_every_candidate_can_be_lowered(self) -> None:
        for layout in candidates(small(), (4.0, 2.0, 1.0, 4.0)):
            lower(small(), plan_graph(small(), 4, layout=layout, groups="each"))


class TestStretch:
    @pytest.mark.parametrize("layout", ["tiles:2x2", "tiles:4x1", "samples:2+tiles:2x1", "whole"])
    def test_stretches_add_up_to_the_prediction(self, layout: str) -> None:
        """Without links to speak of, computing is left, and processor time for messages."""
        cluster = profile(4, mbit_per_s=1e7, latency_s=0.0, cpu_s_per_byte=0.0)
        plan = plan_graph(small(), 4, layout=layout, groups="one")
        whole = predict(lower(small(), plan), cluster, memory=False)
        ground = Ground(small(), Prices(cluster))
        last = len(ground.graph.nodes) - 1
        found = price(ground, Layout.parse(layout), first=0, last=last)
        fixed_s = 3 * Prices(cluster).notes_s(128) + Prices(cluster).net_s(0, 0)
        computed_s = max(whole.compute_s) - Prices(cluster).net_s(0, 0)
        assert 0.85 * computed_s < found.work_s < 1.02 * (whole.step_s - fixed_s)

    def test_groups_of_images_are_joined(self) -> None:
        plan = plan_graph(small(), 2, layout="samples:2", groups="each")
        assert len(tidy(plan).groups) == 1
        assert tidy(plan).groups[0].title == "0..6"
        tiles = plan_graph(small(), 2, layout="tiles:2x1", groups="each")
        assert tidy(tiles) == tiles

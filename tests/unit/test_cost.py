"""Prices, clocks and predictions: what a step costs, and where its seconds go."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
from terrazzo.planner.clocks import Clocks
from terrazzo.planner.cost import predict
from terrazzo.planner.prediction import Prediction
from terrazzo.planner.prices import Prices, speeds
from terrazzo.records import Graph
from terrazzo.records.profile import Load, Own, Profile, Timing
from terrazzo.schedule import lower, traffic
from terrazzo.schedule.gradient import differentiable
from terrazzo.schedule.memory import footprint
from terrazzo.schedule.training import Training
from terrazzo.schedule.work import work

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile

BATCH = 4


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1),
    )  # fmt: skip


@cache
def graph() -> Graph:
    return export(model(), (torch.zeros(BATCH, 3, 48, 48),)).graph


def predicted(cluster: Profile | Prices, layout: str) -> Prediction:
    prices = cluster if isinstance(cluster, Prices) else Prices(cluster)
    plan = plan_graph(graph(), prices.devices, layout=layout, groups="each")
    return predict(lower(graph(), plan), prices)


def exchange(clocks: Clocks, messages: list[tuple[int, int, int]]) -> None:
    """All messages of one exchange; each device goes on when it has its."""
    clocks.depart(messages)
    clocks.arrive()


class TestClocks:
    def clocks(self, **options: Any) -> Clocks:
        clocks = Clocks(Prices(profile(3, **options)))
        clocks.enter(0)
        return clocks

    def test_a_receiver_waits_for_the_sender_and_the_wire(self) -> None:
        clocks = self.clocks(mbit_per_s=80, latency_s=0.01)
        clocks.compute(0, 5.0)
        exchange(clocks, [(0, 1, 10_000_000)])
        assert clocks.now[1] == pytest.approx(6.01, rel=0.05)
        assert clocks.now[2] == 0, "who has no part in it goes on"
        assert clocks.accounts[1].waiting_s == pytest.approx(5.0, rel=0.05)
        assert clocks.accounts[0].compute_s == 5.0

    def test_messages_share_the_link_of_who_gets_them(self) -> None:
        clocks = self.clocks(mbit_per_s=80)
        exchange(clocks, [(0, 2, 10_000_000), (1, 2, 10_000_000)])
        assert clocks.now[2] == pytest.approx(2.0, rel=0.05)
        assert clocks.now[0] == pytest.approx(1.0, rel=0.1)

    def test_on_one_medium_everybody_waits_for_everybody(self) -> None:
        messages = [(0, 1, 5_000_000), (1, 2, 5_000_000), (2, 0, 5_000_000)]
        wired, air = self.clocks(mbit_per_s=80), self.clocks(mbit_per_s=80, shared=True)
        exchange(wired, messages)
        exchange(air, messages)
        assert max(wired.now) == pytest.approx(0.5, rel=0.1)
        assert max(air.now) == pytest.approx(1.5, rel=0.1)

    def test_a_sum_beside_computing_is_felt_only_where_it_outlasts_it(self) -> None:
        for computing_s, felt in ((100.0, False), (0.1, True)):
            clocks = self.clocks()
            clocks.background(10_000_000, (0, 1, 2))
            for device in range(3):
                clocks.compute(device, computing_s)
            clocks.finish()
            assert (clocks.accounts[0].sums_s > 0) == felt
            assert clocks.now[0] > computing_s, "it takes processor time in any case"

    def test_boxes_and_sums_share_a_link(self) -> None:
        free, busy = self.clocks(), self.clocks()
        busy.background(50_000_000, (0, 1, 2))
        for clocks in (free, busy):
            exchange(clocks, [(0, 1, 10_000_000)])
        assert busy.now[1] > 1.5 * free.now[1]

    def test_what_can_wait_is_done_while_messages_are_on_their_way(self) -> None:
        for late_s, expected_s in ((0.5, 1.0), (3.0, 3.0)):
            clocks = self.clocks(mbit_per_s=80)
            clocks.defer(1, late_s)
            exchange(clocks, [(0, 1, 10_000_000)])
            assert clocks.now[1] == pytest.approx(expected_s, rel=0.1)
            assert clocks.accounts[1].compute_s == late_s
            clocks.catch_up(1)
            assert clocks.accounts[1].compute_s == late_s, "it is done once"

    def test_a_meeting_hides_work_too(self) -> None:
        clocks = self.clocks()
        clocks.defer(0, 0.3)
        clocks.defer(2, 2.0)
        clocks.meet(1.0)
        assert clocks.now == [1.0, 1.0, 2.0]

    def test_a_device_under_a_quota_makes_up_for_waiting(self) -> None:
        cluster = profile(2)
        turns = tuple(replace(device, saved_s=0.06) for device in cluster.devices)
        plain, saving = Clocks(Prices(cluster)), Clocks(Prices(replace(cluster, devices=turns)))
        for clocks in (plain, saving):
            clocks.enter(0)
            for _ in range(5):
                clocks.meet(0.04)
                for device in range(2):
                    clocks.compute(device, 0.1)
            clocks.meet(1.0)
            clocks.compute(0, 0.1)
        assert plain.now[0] == pytest.approx(5 * 0.14 + 1.1)
        made_up_s = (5 * 0.04 + 0.06) * (1 - 1 / cluster.devices[0].seconds_per_cpu_s)
        assert saving.now[0] == pytest.approx(plain.now[0] - made_up_s), "no more than it keeps"

    def test_a_sum_is_not_over_before_its_work_is_done(self) -> None:
        clocks = self.clocks(mbit_per_s=1e5, cpu_s_per_byte=1e-8)
        clocks.background(10_000_000, (0, 1, 2))
        clocks.finish()
        assert clocks.now[0] >= clocks.prices.sum_cpu_s(10_000_000, 0)

    def test_every_second_is_booked(self) -> None:
        clocks = self.clocks()
        clocks.compute(1, 0.3)
        clocks.defer(0, 0.05)
        clocks.defer(2, 4.0)
        clocks.background(8_000_000, (0, 1, 2))
        exchange(clocks, [(0, 1, 300_000), (1, 2, 4_000_000), (2, 1, 100_000)])
        clocks.meet(0.02)
        clocks.finish()
        for device, account in enumerate(clocks.accounts):
            booked = account.compute_s + account.exchange_s + account.waiting_s + account.sums_s
            assert booked == pytest.approx(clocks.now[device])


class TestPrices:
    def test_measured_collectives_are_taken_where_there_are_any(self) -> None:
        plain = profile(4)
        assert plain.network is not None
        network = replace(
            plain.network,
            sums_s=((1000, 0.01), (1_000_000, 0.2)),
        )
        prices = Prices(replace(plain, network=network))
        assert prices.sum_s(1_000_000) == pytest.approx(0.2)
        assert prices.sum_s(2_000_000) == pytest.approx(0.39, rel=0.01)
        assert prices.sum_s(1_000_000, 2) < prices.sum_s(1_000_000), "fewer rounds, fewer bytes"

    def test_a_ring_sends_nearly_twice_the_payload(self) -> None:
        prices = Prices(profile(5, mbit_per_s=80, latency_s=0.0))
        assert prices.sum_s(10_000_000) == pytest.approx(2 * 4 / 5, rel=0.05)

    def test_devices_that_are_nearly_alike_count_as_equal(self) -> None:
        assert len(set(speeds(profile((7e9, 7.2e9, 6.9e9))))) == 1
        assert len(set(speeds(profile((7e9, 3e9, 7e9))))) == 2


class TestPredict:
    def test_one_device_takes_the_sum_of_its_operators(self) -> None:
        cluster = profile(1)
        plan = plan_graph(graph(), 1, layout="whole", groups="one")
        prices = Prices(cluster)
        costs = [prices.whole(node, graph(), 0) for node in graph().nodes]
        program = lower(graph(), plan)
        found = predict(program, prices)
        weights = [v for v in graph().values.values() if v.kind == "parameter"]
        first = costs[0].backward_input_s
        total = sum(cost.step_s for cost in costs) - first
        own = prices.net_s(len(weights), 0) + len(costs) * sum(prices.own_s("Operator", 0))
        assert found.step_s == pytest.approx(total + own, rel=0.03)
        assert found.step_s > total + prices.net_s(len(weights), 0) > total
        assert found.exchange_s == (0.0,)
        assert found.bottleneck.startswith("compute on d0")

    @pytest.mark.parametrize("layout", ["tiles:2x2", "samples:4", "channels:4", "tiles:4x1"])
    def test_bytes_are_those_the_program_sends(self, layout: str) -> None:
        program = lower(graph(), plan_graph(graph(), 4, layout=layout, groups="each"))
        weights = {v.name for v in graph().values.values() if v.kind == "parameter"}
        counted = traffic(program, differentiable(program, weights & set(program.arrays)))
        found = predict(program, profile(4), memory=False)
        assert found.sent_bytes == counted.sent_bytes
        assert found.summed_bytes == counted.summed_bytes

    def test_what_the_runtime_takes_itself_is_paid_for_every_step(self) -> None:
        cluster = profile(4)
        bare = tuple(replace(device, own=Own()) for device in cluster.devices)
        without = predicted(replace(cluster, devices=bare), "tiles:4x1")
        program = lower(graph(), plan_graph(graph(), 4, layout="tiles:4x1", groups="each"))
        steps = cluster.devices[0].own.steps_s
        kinds = [type(step).__name__ for step in program.steps]
        least_s = sum(sum(steps[kind]) for kind in kinds if kind in ("Combine", "Exchange"))
        found = predicted(cluster, "tiles:4x1")
        assert found.compute_s[0] - without.compute_s[0] > least_s > 0

    def test_fast_links_make_a_step_nearly_as_many_times_faster(self) -> None:
        quick = {"mbit_per_s": 1e6, "latency_s": 0.0}
        alone = predicted(profile(1), "whole").step_s
        assert alone / predicted(profile(4, **quick), "samples:4").step_s > 2.5

    @pytest.mark.parametrize("layout", ["tiles:2x2", "samples:4", "channels:4"])
    def test_slower_links_never_help(self, layout: str) -> None:
        found = [predicted(profile(4, mbit_per_s=rate), layout).step_s for rate in (1000, 94, 10)]
        assert found == sorted(found)
        air = predicted(profile(4, shared=True), layout).step_s
        assert air > found[1]

    def test_a_slow_device_is_named_and_waited_for(self) -> None:
        cluster = profile((7e9, 7e9, 1e9, 7e9), mbit_per_s=10_000)
        found = predicted(cluster, "samples:4")
        assert found.bottleneck.startswith("compute on d2")
        assert found.waiting_s[0] > found.compute_s[0] > found.waiting_s[2]

    def test_weight_gradients_over_slow_links_are_named(self) -> None:
        found = predicted(profile(4, mbit_per_s=10), "samples:4")
        assert found.bottleneck.startswith("links: weight gradients, the largest those of 8.weight")
        assert min(found.sums_s) > max(found.compute_s)

    def test_channels_need_no_sums_of_weight_gradients(self) -> None:
        found = predicted(profile(4, mbit_per_s=10), "channels:4")
        assert max(found.sums_s) < 0.01
        assert found.bottleneck.startswith("links: maps")

    def test_frozen_weights_cost_neither_arithmetic_nor_traffic(self) -> None:
        every = frozenset(v.target for v in graph().values.values() if v.kind == "parameter")
        some = frozenset(name for name in every if name.startswith(("6.", "8.")))
        trained, part, none = (
            predicted(Prices(profile(4), training=Training(frozen=names)), "samples:4")
            for names in (frozenset[str](), some, every)
        )
        assert none.compute_s[0] < part.compute_s[0] < trained.compute_s[0]
        assert sum(none.summed_bytes) < sum(part.summed_bytes) < sum(trained.summed_bytes)

    def test_passes_repeat_work(self) -> None:
        programs = [
            lower(graph(), plan_graph(graph(), 2, layout="tiles:2x1", groups="one", passes=passes))
            for passes in (0, 4)
        ]
        plain, again = (predict(program, profile(2)).compute_s[0] for program in programs)
        assert 1.0 < again / plain < 1.5 * work(programs[1], 0).times
        assert again / plain > 0.9 * work(programs[1], 0).times

    def test_statistics_are_priced_as_they_were_measured(self) -> None:
        """A reduction writes a few numbers, not a map: beyond what was measured prices are wild."""
        plain = profile(2)
        maps = [Load("moments", rows, 0, 16, 16 * rows, 32) for rows in (100, 1000, 5000)]
        timed = tuple(Timing(load, 1e-6 * load.reads, 1e-6 * load.reads) for load in maps)
        slow = tuple(replace(d, timings=d.timings + timed) for d in plain.devices)
        before = predicted(plain, "samples:2").compute_s[0]
        after = predicted(replace(plain, devices=slow), "samples:2").compute_s[0]
        elements = BATCH // 2 * 16 * 48 * 48
        assert after - before == pytest.approx(2e-6 * elements, rel=0.1)

    def test_memory_is_the_walk_and_the_optimisers_state(self) -> None:
        program = lower(graph(), plan_graph(graph(), 2, layout="tiles:2x1", groups="each"))
        foot = footprint(program, 0)
        plain = predict(program, profile(2)).memory_bytes[0]
        assert plain == foot.total_bytes
        adam = predict(program, Prices(profile(2), training=Training("adam"))).memory_bytes[0]
        weights = [v for v in graph().values.values() if v.kind == "parameter"]
        assert adam - plain == 2 * sum(value.bytes for value in weights)

    def test_seconds_of_devices_add_up(self) -> None:
        found = predicted(profile((7e9, 3e9, 7e9, 7e9)), "tiles:2x2")
        for device in range(4):
            parts = (found.compute_s, found.exchange_s, found.waiting_s, found.sums_s)
            assert sum(part[device] for part in parts) == pytest.approx(found.step_s)

    def test_groups_add_up_to_the_whole(self) -> None:
        found = predicted(profile(4), "tiles:2x2")
        in_groups = sum(group.compute_s[1] for group in found.groups)
        assert 0.9 * found.compute_s[1] < in_groups <= found.compute_s[1]


class TestDelivery:
    """One device reads; the others wait for their part of the input over its link."""

    PIXELS = BATCH * 3 * 48 * 48

    def delivered(self, layout: str, each: int, **options: Any) -> tuple[Prediction, Prediction]:
        cluster = profile(4, **options)
        plan = plan_graph(graph(), 4, layout=layout, groups="each")
        program = lower(graph(), plan)
        return predict(program, cluster), predict(program, Prices(cluster, delivered=each))

    def test_images_travel_over_the_link_of_the_reader(self) -> None:
        before, after = self.delivered("samples:4", 1, mbit_per_s=0.8)
        assert before.delivery_s == 0
        assert after.delivered_bytes == self.PIXELS * 3 / 4
        wire_s = after.delivered_bytes / 0.1e6
        assert wire_s < after.delivery_s < 1.1 * wire_s, "the rest are notes"
        assert after.step_s - before.step_s == pytest.approx(after.delivery_s, rel=0.05)
        assert after.sent_bytes == before.sent_bytes, "maps and gradients alone"

    def test_floats_take_four_times_as_long(self) -> None:
        small, large = (self.delivered("samples:4", each, mbit_per_s=0.8)[1] for each in (1, 4))
        assert large.delivered_bytes == 4 * small.delivered_bytes
        more_s = 3 * small.delivered_bytes / 0.1e6
        assert large.delivery_s - small.delivery_s == pytest.approx(more_s, rel=0.05)

    def test_tiles_have_edges_and_whole_inputs_go_to_everybody(self) -> None:
        tiles, whole = (self.delivered(layout, 1)[1] for layout in ("tiles:2x2", "whole"))
        assert whole.delivered_bytes == 3 * self.PIXELS
        assert self.PIXELS * 3 / 4 < tiles.delivered_bytes < self.PIXELS

    def test_a_device_alone_is_sent_nothing(self) -> None:
        plan = plan_graph(graph(), 1, layout="whole", groups="each")
        found = predict(lower(graph(), plan), Prices(profile(1), delivered=1))
        assert (found.delivery_s, found.delivered_bytes) == (0.0, 0)

    def test_it_is_kept_in_the_record(self) -> None:
        found = self.delivered("samples:4", 1)[1]
        assert Prediction.from_json(found.to_json()) == found

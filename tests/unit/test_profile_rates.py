"""Rates: exact where something was measured, sane everywhere else."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from terrazzo.geometry import Box
from terrazzo.graph.export import export
from terrazzo.graph.rules import rule_for
from terrazzo.planner.rates import Rates, doubtful
from terrazzo.planner.workload import of_local, of_node, padded, workload
from terrazzo.records import Graph, Ref
from terrazzo.records.machine import Machine
from terrazzo.records.profile import DeviceProfile, Load, Timing

steady = settings(derandomize=True, deadline=None, max_examples=60)
MACHINE = Machine("Linux 6 x86_64", "a board", 4, 1 << 30, "3.11.2", "2.13.0", "0.1.0")
CONV = "conv2d 3x3 s1"


def conv(rows: int, inputs: int, outputs: int, family: str = CONV) -> Load:
    return Load(family, rows, 9 * inputs, outputs, rows * inputs, rows * outputs, 9)


def cheap(rows: int, channels: int, family: str = "relu") -> Load:
    return Load(family, rows, 0, channels, rows * channels, rows * channels)


def true_s(load: Load) -> float:
    """A made-up device: arithmetic, traffic, weights put in order, a call; slow on few rows."""
    rate = 7e9 * load.rows / (load.rows + 30)
    return load.flops / rate + 2e-9 * (load.reads + load.writes) + 3e-9 * load.weights + 1e-5


def device(timings: list[Timing]) -> DeviceProfile:
    return DeviceProfile(
        "d", MACHINE, "", 1, 1 << 30, 1.0, (1e-6, 2e-6), 1e9, 1e-9,
        {"sgd": 1e-9, "momentum": 2e-9, "adam": 5e-9}, tuple(timings),
    )  # fmt: skip


def star(rows: int, inputs: int, outputs: int) -> list[Load]:
    """The boxes that measuring takes of one operator."""
    return [
        *(conv(max(1, rows // part), inputs, outputs) for part in (1, 2, 6, 12)),
        *(conv(rows, max(1, inputs // part), outputs) for part in (2, 6)),
        *(conv(rows, inputs, max(1, outputs // part)) for part in (2, 6)),
    ]


def timed(load: Load) -> Timing:
    seconds = true_s(load)
    return Timing(load, seconds, 1.1 * seconds, 1.2 * seconds if load.is_product else None)


@cache
def network() -> Rates:
    shapes = [(43264, 32, 64), (10816, 64, 128), (2704, 128, 256), (676, 256, 512)]
    loads = [load for shape in shapes for load in star(*shape)]
    others = [cheap(rows, 64) for rows in (100, 1000, 10000, 40000)]
    return Rates(device([timed(load) for load in loads + others]))


class TestProducts:
    def test_exact_at_every_measured_point(self) -> None:
        rates = network()
        for timing in rates.device.timings:
            found = rates.seconds(timing.load)
            assert found.forward_s == pytest.approx(timing.forward_s, rel=1e-6)
            assert found.backward_input_s == pytest.approx(timing.backward_input_s, rel=1e-6)
            if timing.load.is_product:
                assert found.backward_weight_s == pytest.approx(timing.backward_weight_s, rel=1e-6)

    def test_close_between_the_points(self) -> None:
        drawn = random.Random(0)
        gaps = []
        for _ in range(200):
            load = conv(
                drawn.randint(60, 40000), 8 * drawn.randint(2, 32), 8 * drawn.randint(2, 64)
            )
            gaps.append(abs(network().seconds(load).forward_s / true_s(load) - 1))
        assert sorted(gaps)[100] < 0.05
        assert max(gaps) < 0.3

    @steady
    @given(st.integers(1, 10**7), st.integers(1, 4096), st.integers(1, 4096))
    def test_never_free_never_faster_than_the_best(self, rows: int, wide: int, out: int) -> None:
        rates, load = network(), conv(rows, wide, out)
        found = rates.seconds(load)
        best = max(t.load.flops / t.forward_s for t in rates.device.timings)
        assert math.isfinite(found.step_s)
        assert found.forward_s >= load.flops / best * (1 - 1e-9) > 0
        assert found.forward_s < 100 * true_s(load)

    def test_a_family_that_was_not_measured_goes_by_all_products(self) -> None:
        load = conv(5000, 64, 64, family="conv2d 5x5 s2")
        assert network().seconds(load).forward_s == pytest.approx(true_s(load), rel=0.5)

    def test_a_small_variant_is_told_apart_by_its_points(self) -> None:
        slow = conv(20, 64, 64, family=f"{CONV} few")
        known = [timed(load) for load in star(2704, 128, 256)]
        rates = Rates(device([*known, Timing(slow, 40 * true_s(slow), None, None)]))
        assert rates.seconds(slow).forward_s == pytest.approx(40 * true_s(slow), rel=1e-6)
        large = conv(2704, 128, 200)
        assert rates.seconds(large).forward_s == pytest.approx(true_s(large), rel=0.2)

    def test_channels_fill_up_vectors(self) -> None:
        uneven, filled = conv(2704, 60, 42), conv(2704, 60, 48)
        gap = network().seconds(uneven).forward_s / network().seconds(filled).forward_s
        assert gap > 0.97  # and not 42/48

    def test_gradients_that_nobody_wants_cost_nothing(self) -> None:
        load = conv(2704, 128, 256)
        found = network().seconds(load)
        frozen_s = network().step_s(load, by_weight=False)
        first_s = network().step_s(load, by_input=False)
        assert frozen_s == pytest.approx(found.forward_s + found.backward_input_s)
        assert first_s == pytest.approx(found.forward_s + found.backward_weight_s)


class TestOthers:
    def test_between_and_beyond_the_points(self) -> None:
        for rows in (150, 5000, 200000):
            load = cheap(rows, 64)
            assert network().seconds(load).forward_s == pytest.approx(true_s(load), rel=0.2)
        assert network().seconds(cheap(5000, 64)).backward_weight_s == 0

    def test_unknown_ones_cost_a_call_at_least(self) -> None:
        assert network().seconds(cheap(1, 1, "never_seen")).forward_s >= 1e-6

    def test_copies_and_updates(self) -> None:
        rates = network()
        assert rates.copy_s(2e9) == pytest.approx(2.0)
        assert rates.padding_s(1000) == pytest.approx(8e-6)
        assert rates.update_s(1e6, "momentum") == pytest.approx(2e-3)
        assert rates.update_s(1e6, "never_seen") == pytest.approx(5e-3)

    def test_a_profile_without_timings_still_answers(self) -> None:
        rates = Rates(device([]))
        assert rates.seconds(conv(100, 8, 8)).forward_s > 0
        assert rates.flops_per_s == 0


# ---- what an operator counts as -----------------------------------------------------------------


@cache
def graph() -> Graph:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.MaxPool2d(2),
        nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Flatten(), nn.Linear(8 * 48 * 48, 5),
    )  # fmt: skip
    return export(model, (torch.zeros(2, 3, 96, 96),)).graph


def loads() -> dict[str, Load]:
    found = [of_node(node, graph()) for node in graph().nodes]
    return {load.family: load for load in found if load is not None}


class TestWorkload:
    def test_operations_are_those_that_the_graph_counts(self) -> None:
        for node in graph().nodes:
            load = of_node(node, graph())
            if load is not None and load.is_product:
                assert load.flops == node.flops, node.title

    def test_families_by_kernel_stride_and_groups(self) -> None:
        assert set(loads()) >= {
            "conv2d 3x3 s2", "conv2d 3x3 s1 depthwise", "conv_transpose2d 2x2 s2", "linear",
            "max_pool2d 2x2 s2", "batch_norm", "relu",
        }  # fmt: skip

    def test_a_tile_has_its_rows_and_reads_its_halo(self) -> None:
        node = graph().nodes[0]
        rule = rule_for(node.op)
        assert rule is not None and rule.local is not None
        box = Box(((0, 2), (0, 16), (12, 24), (0, 48)))
        load = of_local(rule.local(node, graph(), box), box)
        assert load is not None
        assert (load.rows, load.inner, load.outer) == (2 * 12 * 48, 27, 16)
        assert load.reads == 2 * 3 * 25 * 96

    def test_padding_on_one_side_is_a_copy(self) -> None:
        node = graph().nodes[0]
        rule = rule_for(node.op)
        assert rule is not None and rule.local is not None
        inside = Box(((0, 2), (0, 16), (12, 24), (5, 40)))
        corner = Box(((0, 2), (0, 16), (0, 24), (5, 40)))
        assert padded(rule.local(node, graph(), inside)) == 0
        assert padded(rule.local(node, graph(), corner)) == 2 * 3 * 49 * 71

    def test_cut_weights_are_counted_as_they_are(self) -> None:
        args = (Ref("x"), Ref("w"), None, (1, 1), (1, 1), (1, 1), 1)
        shapes = [(1, 40, 26, 26), (64, 40, 3, 3)]
        load = workload("aten.conv2d.default", args, reads=shapes, result=(1, 64, 26, 26))
        assert load == Load(CONV, 676, 360, 64, 40 * 676, 64 * 676, 9)

    def test_small_convolutions_are_a_variant(self) -> None:
        args = (Ref("x"), Ref("w"), None, (1, 1), (1, 1), (1, 1), 1)
        shapes = [(1, 40, 8, 8), (64, 40, 3, 3)]
        load = workload("aten.conv2d.default", args, reads=shapes, result=(1, 64, 8, 8))
        assert load is not None and load.family == f"{CONV} few"

    def test_views_are_no_work(self) -> None:
        result = (2, 24)
        assert workload("aten.reshape.default", (), reads=[(2, 4, 6)], result=result) is None


class TestDoubt:
    def test_a_disturbed_timing_is_found_and_the_worst_comes_first(self) -> None:
        timings = [timed(load) for load in (*star(10816, 64, 128), *star(2704, 128, 256))]
        assert doubtful(timings) == []
        for place, factor in ((3, 2.0), (9, 3.0)):
            load = timings[place].load
            timings[place] = Timing(load, factor * true_s(load), true_s(load), true_s(load))
        assert doubtful(timings)[:2] == [9, 3]

"""What a step trains, and by which optimiser: in predictions, memory and the choice of plans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import zoo
from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export, frozen_in, wants_inputs
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.cost import predict
from terrazzo.planner.fitting import _Search, fit, needed
from terrazzo.planner.prices import Prices
from terrazzo.planner.search import Walk, search
from terrazzo.planner.stretch import Ground, price
from terrazzo.records import Graph, Layout
from terrazzo.records.profile import Own, Profile
from terrazzo.records.units import parse_bytes
from terrazzo.runtime.allocator import heap
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprint
from terrazzo.schedule.training import Training
from terrazzo.schedule.work import work

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile
from test_memory import kept_by_torch
from test_search import mixed

MIB = 1 << 20
BATCH, SIDE = 4, 32
MAP = BATCH * SIDE * SIDE * 4
"""Bytes of a map of one channel."""
BACKBONE = frozenset({"0.weight", "0.bias", "2.weight", "2.bias"})
HEAD = (16 * 4 + 4) * 4
"""Bytes of the weights of the last layer."""


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    )  # fmt: skip


@cache
def graph() -> Graph:
    return export(model(), (torch.zeros(BATCH, 3, SIDE, SIDE),)).graph


def names(graph: Graph) -> frozenset[str]:
    return frozenset(v.target for v in graph.values.values() if v.kind == "parameter")


def bare(devices: int) -> Profile:
    """Devices whose runtime takes nothing for itself, and whose memory costs nothing."""
    found = profile(devices)
    idle = tuple(replace(one, own=Own(), fresh_s_per_byte=0.0) for one in found.devices)
    return replace(found, devices=idle)


class TestTime:
    def by_hand_s(self, prices: Prices) -> float:
        """Forward through all, back through the head alone, and Adam's step over its weights."""
        costs = [prices.whole(node, graph(), 0) for node in graph().nodes]
        forward_s = sum(cost.forward_s for cost in costs)
        return forward_s + costs[-1].backward_weight_s + HEAD / 4 * 2e-8

    def test_of_a_frozen_backbone_the_forward_pass_is_left(self) -> None:
        prices = Prices(bare(1), training=Training("adam", BACKBONE))
        program = lower(graph(), plan_graph(graph(), 1, layout="whole", groups="one"))
        found = predict(program, prices).step_s
        assert found == pytest.approx(self.by_hand_s(prices), rel=1e-9)

    def test_with_passes_nothing_of_it_is_made_again(self) -> None:
        """But the activation before the head, for its weights, whose gradient goes no further."""
        prices = Prices(bare(1), training=Training("adam", BACKBONE))
        plan = plan_graph(graph(), 1, layout="auto", groups=["3"], passes=1)
        again_s = prices.whole(graph().nodes[3], graph(), 0).forward_s
        copied_s = prices.copy_s((3 + 4 + 4) * MAP, 0)  # the input, the result and its gradient
        found = predict(lower(graph(), plan), prices).step_s
        assert found == pytest.approx(self.by_hand_s(prices) + again_s + copied_s, rel=1e-9)

    def test_behind_a_trained_layer_gradients_go_through_frozen_ones(self) -> None:
        prices = Prices(bare(1), training=Training(frozen=names(graph()) - {"0.weight"}))
        plan = plan_graph(graph(), 1, layout="whole", groups="one")
        costs = [prices.whole(node, graph(), 0) for node in graph().nodes]
        by_hand = sum(cost.forward_s for cost in costs) + costs[0].backward_weight_s
        by_hand += sum(cost.backward_input_s for cost in costs[1:]) + 8 * 3 * 9 * 3e-9
        assert predict(lower(graph(), plan), prices).step_s == pytest.approx(by_hand, rel=1e-9)

    def test_only_gradients_of_what_is_trained_are_summed_and_sent(
        self,
    ) -> None:
        frozen = Prices(profile(2), training=Training(frozen=BACKBONE))
        program = lower(graph(), plan_graph(graph(), 2, layout="tiles:2x1", groups="each"))
        found, every = predict(program, frozen), predict(program, profile(2))
        assert found.summed_bytes == (HEAD, HEAD)
        row = MAP // SIDE
        # A row of the first map goes to the neighbour, the result to everybody; nothing goes back.
        assert found.sent_bytes == (8 * row + 4 * MAP // 2,) * 2
        assert every.sent_bytes[0] - found.sent_bytes[0] == 8 * row

    def test_the_walk_from_place_to_place_knows_it_too(self) -> None:
        layout = Layout.tiles(2, 1)
        trained, part, none = (
            Ground(graph(), Prices(profile(2), training=Training(frozen=frozen)))
            for frozen in (frozenset[str](), BACKBONE, names(graph()))
        )
        last = len(graph().nodes) - 1
        runs = [price(ground, layout, first=0, last=last) for ground in (trained, part, none)]
        assert runs[0].sums_s > runs[1].sums_s > runs[2].sums_s == 0.0
        assert runs[0].work_s > runs[1].work_s > runs[2].work_s
        assert runs[2].late_s == 0.0
        assert trained.carries > part.carries > none.carries == frozenset()

    @pytest.mark.parametrize("frozen", [BACKBONE, BACKBONE - {"0.weight"}])
    def test_a_stretch_computes_as_long_as_is_simulated(self, frozen: frozenset[str]) -> None:
        """Without links to speak of, computing is left."""
        fast = profile(4, mbit_per_s=1e7, latency_s=0.0, cpu_s_per_byte=0.0)
        prices = Prices(replace(fast, devices=bare(4).devices), training=Training(frozen=frozen))
        plan = plan_graph(graph(), 4, layout="tiles:2x2", groups="one")
        whole = predict(lower(graph(), plan), prices, memory=False)
        ground = Ground(graph(), prices)
        run = price(ground, Layout.tiles(2, 2), first=0, last=len(ground.graph.nodes) - 1)
        assert run.work_s == pytest.approx(max(whole.compute_s), rel=0.07)

    def test_arithmetic(self) -> None:
        program = lower(graph(), plan_graph(graph(), 1, layout="auto", groups="one", passes=4))
        trained, head = work(program, 0), work(program, 0, training=Training(frozen=BACKBONE))
        assert trained.repeated_flops > head.repeated_flops
        assert trained.step_flops > 2 * head.step_flops
        nothing = work(program, 0, training=Training(frozen=names(graph())))
        assert (3 * nothing.step_flops, nothing.repeated_flops) == (trained.step_flops, 0)


class TestMemory:
    def test_what_is_kept_of_a_frozen_backbone(self) -> None:
        program = lower(graph(), plan_graph(graph(), 1, layout="whole", groups="one"))
        foot = footprint(program, 0, training=Training(frozen=BACKBONE))
        assert foot.kept_bytes == (3 + 16 + 4) * MAP, "the input, what the head reads, the result"
        assert foot.weight_gradients_bytes in (0, HEAD)
        every = footprint(program, 0)
        assert foot.weights_bytes == every.weights_bytes
        assert foot.total_bytes < every.total_bytes

    @pytest.mark.parametrize("name", ["resnet18", "mobilenetv2-se"])
    def test_as_torch_keeps(self, name: str) -> None:
        torch.manual_seed(0)
        model, x = zoo.build(name), torch.randn(2, 3, 96, 96)
        weights = list(model.parameters())
        for weight in weights[: len(weights) * 2 // 3]:
            weight.requires_grad_(False)
        known = export(model, (x,)).graph
        program = lower(known, plan_graph(known, 1, layout="auto", groups="auto"))
        foot = footprint(program, 0, training=Training(frozen=frozen_in(model)))
        assert foot.kept_bytes == pytest.approx(kept_by_torch(model, x), rel=0.1)
        assert foot.kept_bytes < 0.5 * footprint(program, 0).kept_bytes

    def test_gradients_of_inputs_keep_what_is_frozen(self) -> None:
        """Behind inputs that want gradients all maps are kept, and all gradients of inputs made."""
        program = lower(graph(), plan_graph(graph(), 1, layout="whole", groups="one"))
        trained = footprint(program, 0)
        forward, asked = (
            footprint(program, 0, training=Training(frozen=names(graph()), inputs=inputs))
            for inputs in (False, True)
        )
        assert forward.kept_bytes < asked.kept_bytes <= trained.kept_bytes
        assert forward.weight_gradients_bytes == asked.weight_gradients_bytes == 0
        assert forward.map_gradients_bytes == 0 < asked.map_gradients_bytes
        prices = bare(1)
        forward_s, asked_s, trained_s = (
            predict(program, Prices(prices, training=training), memory=False).step_s
            for training in (
                Training(frozen=names(graph())),
                Training(frozen=names(graph()), inputs=True),
                Training(),
            )
        )
        assert forward_s < asked_s and 1.5 * forward_s < trained_s

    def test_an_optimiser_keeps_its_part_of_what_is_trained(self) -> None:
        weights = sum(v.bytes for v in graph().values.values() if v.kind == "parameter")
        whole = lower(graph(), plan_graph(graph(), 2, layout="samples:2", groups="each"))
        cut = lower(graph(), plan_graph(graph(), 2, layout="channels:2", groups="each"))
        found = {
            optimizer: footprint(whole, 1, training=Training(optimizer))
            for optimizer in ("sgd", "momentum", "adam")
        }
        states = [foot.states_bytes for foot in found.values()]
        assert states == [0, weights, 2 * weights]
        totals = [foot.total_bytes - foot.states_bytes for foot in found.values()]
        assert totals == [found["sgd"].total_bytes] * 3
        assert footprint(cut, 1, training=Training("adam")).states_bytes == weights
        head = footprint(whole, 1, training=Training("adam", BACKBONE))
        assert head.states_bytes == 2 * HEAD


def heavy_model() -> nn.Sequential:
    """Maps that passes can spare, and weights of 4.5 MiB."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 256, 1), nn.Conv2d(256, 512, 3, padding=1)]
    return nn.Sequential(*layers)


@cache
def heavy() -> Graph:
    return export(heavy_model(), (torch.zeros(2, 3, 192, 192),)).graph


class TestLimits:
    def test_with_adam_passes_are_needed_where_plain_descent_fits(self) -> None:
        plan = plan_graph(heavy(), 1, layout="auto", groups="auto")
        limit = needed(heavy(), plan).total_bytes
        adam = Training("adam")
        assert fit(heavy(), plan, limit) is plan
        found = fit(heavy(), plan, limit, training=adam)
        assert any(group.passes for group in found.groups)
        assert needed(heavy(), found, training=adam).total_bytes <= limit
        frozen = Training("adam", names(heavy()))
        assert fit(heavy(), plan, limit, training=frozen) is plan, "it keeps nothing of these"

    def test_a_refusal_names_the_state_and_says_what_would_do(self) -> None:
        plan = plan_graph(heavy(), 1, layout="auto", groups="auto")
        adam = Training("adam")
        with pytest.raises(PlanError, match=r"the optimiser's state 9\.1 MiB, maps and") as refused:
            fit(heavy(), plan, 20 * MIB, training=adam)
        advised = parse_bytes(str(refused.value).split('memory="')[1].split('"')[0])
        found = fit(heavy(), plan, advised, training=adam)
        assert needed(heavy(), found, training=adam).total_bytes <= advised
        with pytest.raises(PlanError) as plain:
            fit(heavy(), plan, 10 * MIB)
        assert "optimiser's state" not in str(plain.value)

    @pytest.mark.parametrize("optimizer", ["momentum", "adam"])
    def test_searched_plans_keep_the_limit_with_it(self, optimizer: str) -> None:
        cluster = profile(2)
        free = search(heavy(), cluster).best.prediction
        limit = max(free.memory_bytes)
        training = Training(optimizer)
        found = search(heavy(), cluster, memory_bytes=limit, training=training).best
        assert max(found.prediction.memory_bytes) <= limit
        needs = [footprint(lower(heavy(), found.plan), d, training=training) for d in range(2)]
        assert found.prediction.memory_bytes == tuple(need.total_bytes for need in needs)

    def test_a_frozen_backbone_needs_no_passes_where_a_trained_one_does(self) -> None:
        plan = plan_graph(heavy(), 1, layout="auto", groups="auto")
        limit = int(0.8 * needed(heavy(), plan).total_bytes)
        assert fit(heavy(), plan, limit) != plan
        layers = frozenset(name for name in names(heavy()) if int(name.partition(".")[0]) < 12)
        assert fit(heavy(), plan, limit, training=Training(frozen=layers)) is plan

    def test_groups_that_are_frozen_repeat_nothing(self) -> None:
        layers = frozenset(name for name in names(heavy()) if int(name.partition(".")[0]) < 9)
        plan = plan_graph(heavy(), 1, layout="auto", groups="auto")
        training = Training(frozen=layers)
        one, every = (
            _Search(heavy(), plan, 4, limits=(0,), training=known)
            for known in (training, Training())
        )
        frozen = sum(not item.live for item in one.items)
        assert 0 < frozen < len(one.items)
        alone, same = one._run(0, frozen - 1), every._run(0, frozen - 1)
        assert (alone.repeated, alone.least, alone.alive) == (0, 0, 0)
        assert same.repeated > 0 and same.least > 0 and same.alive > 0
        across, last = one._run(0, len(one.items) - 1), one._run(frozen, len(one.items) - 1)
        assert across.repeated > last.repeated, "what is trained reads what was frozen again"

    def test_passes_for_what_is_left_to_train(self) -> None:
        """The first layers frozen: less is to be kept and repeated, and limits are kept still."""
        training = Training(frozen=frozenset(n for n in names(heavy()) if n[:2] in ("0.", "1.")))
        plan = plan_graph(heavy(), 1, layout="auto", groups="auto")
        limit = int(0.8 * needed(heavy(), plan, training=training).total_bytes)
        found = fit(heavy(), plan, limit, training=training)
        assert any(group.passes for group in found.groups)
        assert needed(heavy(), found, training=training).total_bytes <= limit


class TestChoice:
    def test_frozen_late_layers_have_no_sums_that_channels_would_spare(self) -> None:
        late = frozenset(n for n in names(mixed()) if n.startswith(("6.", "8.")))
        trained = search(mixed(), profile(4)).best
        frozen = search(mixed(), profile(4), training=Training(frozen=late)).best
        assert "c" in trained.plan.groups[-1].layout.letters
        assert not any("c" in group.layout.letters for group in frozen.plan.groups)
        prices = Prices(profile(4), training=Training(frozen=late))
        assert frozen.prediction.step_s < predict(lower(mixed(), trained.plan), prices).step_s

    def test_the_walk_is_made_with_what_is_trained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Training] = []

        class Seen(Walk):
            def __init__(self, graph: Graph, prices: Prices, layouts: Sequence[Layout]) -> None:
                seen.append(prices.training)
                super().__init__(graph, prices, layouts)

        monkeypatch.setattr("terrazzo.planner.search.Walk", Seen)
        search(graph(), profile(2), training=Training("adam", BACKBONE))
        assert seen == [Training("adam", BACKBONE)]

    def test_plans_know_what_a_model_has_frozen(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(8),
            nn.Conv2d(16, 512, 3, padding=1), nn.Conv2d(512, 256, 3, padding=1),
        )  # fmt: skip
        x, known = torch.zeros(1, 3, 128, 128), profile(2)
        every = tz.plan(net, (x,), profile=known)
        net[2:].requires_grad_(False)
        found = tz.plan(net, (x,), profile=known)
        late = frozenset({"2.weight", "2.bias", "3.weight", "3.bias"})
        wishes = Wishes(profile=known, delivered=1, training=Training(frozen=late))
        assert found == wishes.plan(export(net, (x,)).graph, 2)
        assert found != every
        net.requires_grad_(True)
        assert tz.plan(net, (x,), profile=known) == every

    def test_who_trains_nothing_wants_gradients_of_inputs(self) -> None:
        """A perceptual loss, say: memory="..." must hold for its backward pass."""
        frozen = heavy_model().requires_grad_(False)
        x = torch.zeros(1, 3, 64, 64)
        assert wants_inputs(frozen, (x,))
        assert not wants_inputs(heavy_model(), (x,))
        assert wants_inputs(heavy_model(), (x.clone().requires_grad_(),))
        half = heavy_model()
        half[0].requires_grad_(False)
        assert not wants_inputs(half, {"x": x}.values())

    def test_a_shared_weight_is_frozen_by_all_its_names(self) -> None:
        net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        net[1].weight = net[0].weight
        net[0].weight.requires_grad_(False)
        found = frozen_in(net)
        assert found == {"0.weight", "1.weight"}
        shared = export(net, (torch.zeros(1, 4, 9, 9),)).graph
        trained = Training(frozen=found).weights(shared)
        assert {shared.values[name].target for name in trained} == {"0.bias", "1.bias"}

    def test_an_unknown_optimiser_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"optimizer='lion': say one of .sgd., .mom"):
            tz.plan(model(), (torch.zeros(1, 3, 8, 8),), optimizer="lion")
        with pytest.raises(UsageError, match="optimizer='lion'"):
            tz.parallelize(model(), (torch.zeros(1, 3, 8, 8),), optimizer="lion")


class TestNet:
    def test_a_net_is_planned_for_what_it_trains(self, capfd: pytest.CaptureFixture[str]) -> None:
        x, plan = torch.randn(2, 3, 192, 192), plan_graph(heavy(), 1, layout="auto", groups="auto")
        limit = needed(heavy(), plan).total_bytes
        asked = {"memory": limit, "optimizer": "adam"}
        assert any(g.passes for g in tz.parallelize(heavy_model(), (x,), **asked).plan.groups)
        model = heavy_model()
        model[:12].requires_grad_(False)
        net = tz.parallelize(model, (x,), **asked)
        assert not any(group.passes for group in net.plan.groups)
        net(x).sum().backward()
        assert "trained that the plan" not in capfd.readouterr().err
        model.requires_grad_(True)
        for _ in range(2):
            net(x).sum().backward()
        told = capfd.readouterr().err
        assert told.count("16 parameters are trained that the plan takes for frozen") == 1
        net.change_plan(tz.plan(net, (x,), **asked))
        assert any(group.passes for group in net.plan.groups)

    @pytest.mark.skipif(heap() is None, reason="this C library does not tell what is in use")
    def test_steps_with_passes_keep_to_what_their_training_needs(self) -> None:
        x = torch.randn(2, 3, 192, 192)
        net = tz.parallelize(heavy_model(), (x,), passes=4)
        (ready,) = net._ready.values()
        for trained in (True, False):
            net[:12].requires_grad_(trained)
            net(x).sum().backward()
        with torch.no_grad():
            net(x)
        whole, head, none = (room.most_bytes for room in ready.machine._rooms.values())
        assert head < 0.95 * whole
        assert none == whole, "forward alone may take as much as training"

"""The memory of a step before it runs, and plans that fit a limit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import zoo
from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.fitting import fit, needed, smallest_plan
from terrazzo.records import Graph
from terrazzo.records.units import parse_bytes
from terrazzo.runtime.allocator import heap
from terrazzo.runtime.convolutions.backward import gradients
from terrazzo.runtime.steps import passes
from terrazzo.schedule import Exchange, lower
from terrazzo.schedule.ledger import BETWEEN_BYTES, Footprint, Ledger
from terrazzo.schedule.memory import _Walk, footprint
from terrazzo.schedule.saving import Operation, Tensor
from terrazzo.schedule.training import EVERYTHING
from terrazzo.schedule.work import work

MIB = 1 << 20


def graph_of(model: nn.Module, *shape: int) -> Graph:
    return export(model, (torch.randn(shape),)).graph


@pytest.fixture(scope="module")
def unet() -> Graph:
    return graph_of(zoo.build("unet32"), 1, 3, 512, 512)


def kept_by_torch(model: nn.Module, x: torch.Tensor) -> int:
    """What autograd really holds between forward and backward, weights aside."""
    weights = {p.data_ptr() for p in model.parameters()} | {b.data_ptr() for b in model.buffers()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    storages[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("unet32", 0.96),
        ("mobilenetv2-se", 1),
        ("vgg", 0.5),
        ("resnet18", 0.83),
        ("yolov2-small", 0.72),
    ],
)
def test_what_autograd_keeps(name: str, share: float) -> None:
    """Without passes, the maps that wait for the backward pass are those that torch saves; fewer
    where there are pools, which go ahead and keep a byte where torch keeps a map and an index."""
    model, x = zoo.build(name), torch.randn(2, 3, 96, 96)
    graph = export(model, (x,)).graph
    plan = plan_graph(graph, 1, layout="auto", groups="auto")
    foot = footprint(lower(graph, plan), 0)
    assert foot.weights_bytes >= sum(p.nbytes for p in model.parameters())
    assert 0 <= foot.weight_gradients_bytes <= sum(p.nbytes for p in model.parameters())
    assert foot.kept_bytes == pytest.approx(share * kept_by_torch(model, x), rel=0.05)


def test_a_tile_needs_less_than_all(unet: Graph) -> None:
    whole = needed(unet, plan_graph(unet, 1, layout="auto", groups="each"))
    tiles = needed(unet, plan_graph(unet, 4, layout="tiles:2x2", groups="each"))
    assert tiles.maps_bytes < 0.4 * whole.maps_bytes
    assert tiles.maps_bytes > 0.2 * whole.maps_bytes


class TestCounted:
    """Small cases, worked out by hand."""

    def kept(self, *layers: nn.Module) -> int:
        """Between forward and backward, of one image of 16x16 in three channels."""
        graph = graph_of(nn.Sequential(*layers), 1, 3, 16, 16)
        return footprint(
            lower(graph, plan_graph(graph, 1, layout="auto", groups="one")), 0
        ).kept_bytes

    def test_a_pool_by_rows_keeps_a_byte_for_each_maximum(self) -> None:
        first, last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        image, pooled, result = 3 * 256 * 4, 8 * 64 * 4, 2 * 64 * 4
        assert self.kept(first, nn.MaxPool2d(2), last) == image + pooled + 8 * 64 + result
        read, places = 8 * 256 * 4, 8 * 64 * 8
        own = self.kept(first, nn.MaxPool2d(2, ceil_mode=True), last)
        assert own == image + read + pooled + places + result

    def test_a_clamp_keeps_what_it_made(self) -> None:
        kept = self.kept(nn.Conv2d(3, 8, 1), nn.ReLU6(), nn.Conv2d(8, 2, 1))
        assert kept == (3 + 8 + 2) * 256 * 4

    def test_what_stays_on_a_device_is_in_no_message(self) -> None:
        model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)))
        graph = graph_of(model, 1, 8, 16, 16)
        program = lower(graph, plan_graph(graph, 2, layout="tiles:2x1", groups="each"))
        walk, row = _Walk(program, 0, EVERYTHING), 8 * 16 * 4
        sizes = [walk._messages(step) for step in program.steps if isinstance(step, Exchange)]
        # An edge out and an edge in; then half of the result out, and half in.
        assert sizes == [2 * row, 2 * 8 * row]

    def test_windows_are_held_more_than_once_on_the_way(self) -> None:
        def of(read: int, made: int, windows: int = 0) -> Operation:
            ends = (Tensor("x", read * MIB, 0),), (Tensor("y", made * MIB, 0),)
            return Operation("conv2d", *ends, windows=windows * MIB)

        assert of(3, 1, windows=9).working_bytes == (5 + 2 * 9) * MIB  # strips, 5 MiB at most
        assert of(3, 1, windows=9).summing_bytes == (5 + 4 * 9) * MIB
        assert of(1, 1, windows=1).working_bytes == (4 + 2 * 1) * MIB
        assert of(30, 10, windows=1).working_bytes == (30 + 2 * 1) * MIB  # one map, copied
        assert of(3, 1).working_bytes == of(3, 1).summing_bytes == 3 * MIB  # windows of a pixel

    def test_holes_are_a_part_of_what_comes_and_goes(self) -> None:
        foot = Footprint(20 * MIB, 10 * MIB, 60 * MIB, 20 * MIB, 10 * MIB, apart_bytes=40 * MIB)
        assert foot.used_bytes == 120 * MIB
        assert foot.idle_bytes == int(0.58 * (100 - 40) * MIB)

    @pytest.mark.parametrize(("largest", "between"), [(4 * MIB, 10 * MIB), (12 * MIB, 22 * MIB)])
    def test_where_pages_are_returned_little_is_idle(self, largest: int, between: int) -> None:
        foot = Footprint(20 * MIB, maps_bytes=100 * MIB, tidy=True, largest_map_bytes=largest)
        assert foot.idle_bytes == 17 * MIB + between
        assert between <= BETWEEN_BYTES

    def test_large_blocks_leave_no_holes(self) -> None:
        ledger = Ledger(Footprint())
        ledger.hold("large", 32 * MIB)
        ledger.flow("small", 31 * MIB)
        ledger.note("here")
        assert ledger.peak.apart_bytes == 32 * MIB
        ledger.drop("large")
        ledger.flow("too", 40 * MIB)
        ledger.earn("weight", 33 * MIB)
        ledger.note("there", 1)
        assert ledger.peak.apart_bytes == 73 * MIB
        ledger.consume("too")
        ledger.hold("more", 30 * MIB)
        ledger.note("and there", 40 * MIB)
        assert ledger.peak.apart_bytes == 33 * MIB


def test_what_a_convolution_read_is_gone_before_its_chain_is_differentiated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a strip: input and gradient of the convolution, 4 MiB each, make room for what the
    gradients of the operators before it need."""
    own = heap()
    if own is None:
        pytest.skip("NOT TESTED: this C library cannot be asked for its free memory")
    uses: list[int] = []
    real = passes.Piece.backward

    def noted(*arguments: object) -> object:
        uses.append(own.in_use_bytes())
        return gradients(*arguments)

    def chain(piece: passes.Piece, grads: object) -> object:
        uses.append(own.in_use_bytes())
        return real(piece, grads)

    monkeypatch.setattr(passes, "gradients", noted)
    monkeypatch.setattr(passes.Piece, "backward", chain)
    layers = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    x = torch.randn(1, 3, 512, 512)
    net = tz.parallelize(nn.Sequential(*layers), (x,), groups="one", passes=2)
    net(x).sum().backward()
    before, after = uses[:2]
    assert after <= before - 3 * MIB


class TestFitting:
    def test_what_fits_is_left_alone(self, unet: Graph) -> None:
        plan = plan_graph(unet, 1, layout="auto", groups="auto")
        assert fit(unet, plan, 4096 * MIB) is plan

    @pytest.mark.parametrize("devices", [1, 2])
    @pytest.mark.parametrize("share", [0.75, 0.6])
    def test_less_memory_more_work(self, unet: Graph, devices: int, share: float) -> None:
        plan = plan_graph(unet, devices, layout="auto", groups="auto")
        limit = int(needed(unet, plan).total_bytes * share)
        found = fit(unet, plan, limit)
        assert needed(unet, found).total_bytes <= limit
        assert {group.layout for group in found.groups} == {plan.groups[0].layout}
        assert work(lower(unet, found), 0).times > 1.0

    def test_no_more_is_repeated_than_needed(self, unet: Graph) -> None:
        plan = plan_graph(unet, 1, layout="auto", groups="auto")
        whole = needed(unet, plan).total_bytes
        times = [
            work(lower(unet, fit(unet, plan, int(whole * share))), 0).times
            for share in (1.0, 0.8, 0.6, 0.45)
        ]
        assert times == sorted(times)
        assert times[0] == 1.0

    @pytest.mark.parametrize("deep", [True, False], ids=["unet", "where passes do not help"])
    def test_the_impossible_is_refused_with_what_would_do(self, unet: Graph, deep: bool) -> None:
        shallow = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        graph = unet if deep else graph_of(shallow, 4, 3, 200, 280)
        plan = plan_graph(graph, 1, layout="auto", groups="auto")
        with pytest.raises(PlanError, match="limit 20") as refused:
            fit(graph, plan, 20 * MIB)
        advised = parse_bytes(str(refused.value).split('memory="')[1].split('"')[0])
        assert needed(graph, fit(graph, plan, advised)).total_bytes <= advised

    def test_several_devices_keep_little_of_what_they_exchange(self, unet: Graph) -> None:
        """What travels is read by who gets it: borders are no better at every operator."""
        plan = plan_graph(unet, 4, layout="tiles:4x1", groups="each")
        every = plan_graph(unet, 4, layout="tiles:4x1", groups="each", passes=16)
        least = min(needed(unet, found).maps_bytes for found in smallest_plan(unet, plan))
        assert least < 0.5 * needed(unet, every).maps_bytes

    def test_a_pool_ahead_of_its_norm_needs_no_more(self) -> None:
        """Statistics do not keep what they are taken of; beyond the edge, pools stay behind."""
        least = []
        for ceil in (False, True):
            layers: list[nn.Module] = []
            for wide, thin in ((3, 16), (16, 64), (64, 8)):
                layers += [nn.Conv2d(wide, thin, 3, padding=1), nn.BatchNorm2d(thin), nn.ReLU()]
                layers.append(nn.MaxPool2d(2, ceil_mode=ceil))
            graph = graph_of(nn.Sequential(*layers, nn.Conv2d(8, 2, 1)), 2, 3, 512, 512)
            plan = plan_graph(graph, 2, layout="samples", groups="auto")
            least.append(min(needed(graph, p).total_bytes for p in smallest_plan(graph, plan)))
        assert least[0] <= least[1]

    def test_no_borders_do_better(self) -> None:
        """Every way to end groups of a small chain, tried out."""
        layers = [
            layer
            for wide, thin in ((3, 8), (8, 16), (16, 8), (8, 8))
            for layer in (nn.Conv2d(wide, thin, 3, padding=1), nn.BatchNorm2d(thin), nn.ReLU())
        ]
        graph = graph_of(nn.Sequential(*layers, nn.Conv2d(8, 2, 1)), 1, 3, 512, 512)
        plan = plan_graph(graph, 1, layout="auto", groups="auto")
        names = ["0", "3", "6", "9"]
        every = [
            plan_graph(
                graph,
                1,
                layout="auto",
                groups=[name for bit, name in enumerate(names) if choice >> bit & 1] or "one",
                passes=4,
            )
            for choice in range(16)
        ]
        known = [(needed(graph, p).total_bytes, work(lower(graph, p), 0).times) for p in every]
        for limit, _ in known:
            found = fit(graph, plan, limit)
            best = min(times for size, times in known if size <= limit)
            assert work(lower(graph, found), 0).times <= best + 1e-9


class TestWishes:
    def test_sizes(self) -> None:
        assert parse_bytes("700MiB") == 700 * MIB
        assert parse_bytes("1.5 GiB") == 1536 * MIB
        assert parse_bytes("900MB") == 900_000_000
        assert parse_bytes(12345) == 12345

    @pytest.mark.parametrize("text", ["", "much", "-3MiB", "0", "7 TiB", "MiB"])
    def test_what_is_no_size_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="amount of memory"):
            Wishes(memory=text)

    def test_memory_chooses_groups_itself(self) -> None:
        with pytest.raises(UsageError, match="leave groups"):
            Wishes(memory="1GiB", groups="one")
        with pytest.raises(UsageError, match="leave groups"):
            Wishes(memory="1GiB", passes=4)

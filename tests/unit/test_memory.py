"""The memory of a step before it runs, and plans that fit a limit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrazzo import zoo
from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.fitting import fit, needed, smallest_plan
from terrazzo.records import Graph
from terrazzo.records.units import parse_bytes
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprint
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
    [("unet32", 1), ("mobilenetv2-se", 1), ("vgg", 1), ("resnet18", 0.89), ("yolov2-small", 0.83)],
)
def test_what_autograd_keeps(name: str, share: float) -> None:
    """Without passes, the maps that wait for the backward pass are those that torch saves; fewer
    where pools go ahead of norms."""
    model, x = zoo.build(name), torch.randn(2, 3, 96, 96)
    graph = export(model, (x,)).graph
    plan = plan_graph(graph, 1, layout="auto", groups="auto")
    foot = footprint(lower(graph, plan), 0)
    assert foot.weights_bytes >= sum(p.nbytes for p in model.parameters())
    assert 0 <= foot.weight_gradients_bytes <= sum(p.nbytes for p in model.parameters())
    assert foot.kept_bytes == pytest.approx(share * kept_by_torch(model, x), rel=0.1)


def test_a_tile_needs_less_than_all(unet: Graph) -> None:
    whole = needed(unet, plan_graph(unet, 1, layout="auto", groups="each"))
    tiles = needed(unet, plan_graph(unet, 4, layout="tiles:2x2", groups="each"))
    assert tiles.maps_bytes < 0.4 * whole.maps_bytes
    assert tiles.maps_bytes > 0.2 * whole.maps_bytes


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
        least = min(needed(unet, found).used_bytes for found in smallest_plan(unet, plan))
        assert least < 0.8 * needed(unet, every).used_bytes

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

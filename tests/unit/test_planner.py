"""Plans: explicit layouts and groups, wishes with a profile, and the same plan for other sizes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export
from terrazzo.graph.rules.windows import windowed
from terrazzo.measure.key import measured_by
from terrazzo.measure.known import given_profile, kept_profile
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.explicit import best_grid, regrouped
from terrazzo.planner.retarget import retarget
from terrazzo.planner.wishes import IDLE_BYTES, SMALL_IDLE_BYTES, room_bytes
from terrazzo.planning import informed
from terrazzo.records import Graph, Layout, Plan
from terrazzo.records.machine import SMALL_BYTES, Machine
from terrazzo.schedule import lower, traffic
from terrazzo.schedule.tiling import group_of_nodes

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 4, 3, padding=1), norm1=nn.BatchNorm2d(4), act1=nn.ReLU(),
            pool=nn.MaxPool2d(3, 2, 1), conv2=nn.Conv2d(4, 4, 3, padding=1),
            block=nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)),
            mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, 3),
        )
    )  # fmt: skip


@cache
def graph(shape: tuple[int, ...] = (2, 3, 20, 12), *, training: bool = True) -> Graph:
    return export(model().train(training), (torch.zeros(shape),)).graph


@pytest.fixture(scope="module")
def small() -> Graph:
    return graph()


def ends(graph: Graph, plan: Plan) -> list[str]:
    """The layers at the end of groups."""
    return [graph.nodes[graph.producer[group.last]].layer for group in plan.groups]


def heads(graph: Graph, plan: Plan) -> list[int]:
    """How many operators with windows each group holds."""
    last, found = -1, []
    for group in plan.groups:
        end = graph.producer[group.last]
        found.append(sum(windowed(node, graph) for node in graph.nodes[last + 1 : end + 1]))
        last = end
    return found


class TestRegrouped:
    def test_layouts_stay_where_they_are_and_borders_move(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="tiles:2x1", groups="conv1,conv2")
        first, *rest = plan.groups
        channels = Layout.parse("channels:2")
        mixed = replace(plan, groups=(first, *(replace(group, layout=channels) for group in rest)))
        at = [str(mixed.groups[place].layout) for place in group_of_nodes(small, mixed)]
        for groups in ("one", "each"):
            found = regrouped(small, mixed, groups)
            assert [str(found.groups[g].layout) for g in group_of_nodes(small, found)] == at
            lower(small, found)
        assert len(regrouped(small, mixed, "one").groups) == 2
        assert len(regrouped(small, mixed, "each").groups) > len(mixed.groups)


class TestLayout:
    def test_auto_takes_the_shortest_borders(self, small: Graph) -> None:
        assert best_grid(small, 2) == Layout.tiles(2, 1), "cut the long side"
        assert best_grid(graph((1, 3, 8, 40)), 2) == Layout.tiles(1, 2)
        assert best_grid(graph((1, 3, 32, 32)), 4) == Layout.tiles(2, 2)
        assert best_grid(small, 5) == Layout.tiles(5, 1)
        assert best_grid(small, 1) == Layout.tiles(1, 1)

    def test_auto_without_pictures_is_whole(self) -> None:
        vector = export(nn.Linear(4, 3), (torch.zeros(2, 4),)).graph
        assert plan_graph(vector, 3, layout="auto", groups="auto").groups[0].layout.is_whole

    def test_a_named_layout_is_taken(self, small: Graph) -> None:
        for layout in ("tiles:3,2,1x1", Layout.tiles((3, 2, 1), 1)):
            plan = plan_graph(small, 3, layout=layout, groups="one")
            assert {str(group.layout) for group in plan.groups} == {"tiles:3,2,1x1"}

    def test_a_layout_for_other_devices_is_refused_with_one_that_fits(self, small: Graph) -> None:
        with pytest.raises(PlanError, match=r'tiles:2x2 is for 4 devices.*layout="tiles:3x1"'):
            plan_graph(small, 3, layout="tiles:2x2", groups="one")

    @pytest.mark.parametrize("layout", ["tiles:2", "tiles:2x", "tiles:0x2", "rows:2"])
    def test_nonsense_is_refused(self, small: Graph, layout: str) -> None:
        with pytest.raises(UsageError):
            plan_graph(small, 2, layout=layout, groups="one")

    @pytest.mark.parametrize("layout", ["tiles", "auto"])
    def test_tiles_alone_means_the_grid_with_the_shortest_borders(
        self, small: Graph, layout: str
    ) -> None:
        plan = plan_graph(small, 3, layout=layout, groups="one")
        assert plan.groups[0].layout == best_grid(small, 3)

    def test_no_devices_are_refused(self, small: Graph) -> None:
        with pytest.raises(UsageError, match="at least 1"):
            plan_graph(small, 0, layout="whole", groups="one")


class TestGroups:
    def test_auto_gives_every_window_its_own_group(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="auto", groups="auto")
        assert set(heads(small, plan)) == {1}
        assert len(plan.groups) == sum(windowed(node, small) for node in small.nodes)

    def test_each_gives_every_product_its_own_group(self, small: Graph) -> None:
        """Those of single pixels too, which in channels read what the others hold."""
        plan = plan_graph(small, 2, layout="auto", groups="each")
        places = zip(group_of_nodes(small, plan), small.nodes, strict=True)
        products = {"conv2d", "max_pool2d", "linear"}
        own = [place for place, node in places if node.op.split(".")[1] in products]
        assert own == list(range(6)) == list(range(len(plan.groups)))

    def test_in_channels_each_exchanges_inside_of_pairs_and_auto_does_not(self) -> None:
        pair = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        graph = export(pair, (torch.zeros(1, 4, 8, 8),)).graph
        plans = (plan_graph(graph, 2, layout="channels:2", groups=one) for one in ("auto", "each"))
        auto, each = (sum(traffic(lower(graph, plan), set()).sent_bytes) for plan in plans)
        assert 0 < auto < each

    def test_one(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="auto", groups="one")
        assert [group.last for group in plan.groups] == [small.nodes[-1].output]

    @pytest.mark.parametrize("count", [1, 2, 3, 4, "2"])
    def test_a_number_shares_out_the_windows(self, small: Graph, count: Any) -> None:
        plan = plan_graph(small, 2, layout="auto", groups=count)
        found = heads(small, plan)
        assert len(found) == int(count)
        assert max(found) - min(found) <= 1

    @pytest.mark.parametrize("groups", [["norm1", "block"], "norm1,block", ("block", "norm1")])
    def test_names_of_layers_end_groups(self, small: Graph, groups: Any) -> None:
        plan = plan_graph(small, 2, layout="auto", groups=groups)
        assert ends(small, plan) == ["norm1", "block.2", "head"]

    def test_the_title_names_first_and_last_layer(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="tiles:2x1", groups=["pool"])
        assert [group.title for group in plan.groups] == ["conv1..act1", "conv2..head"]
        text = str(plan)
        assert "plan for 2 devices" in text
        assert "group 1: conv2..head  tiles:2x1" in text

    @pytest.mark.parametrize("groups", [0, 99, -1])
    def test_too_many_or_too_few_are_refused(self, small: Graph, groups: int) -> None:
        with pytest.raises(PlanError, match=r"from 1 to"):
            plan_graph(small, 2, layout="auto", groups=groups)

    def test_an_unknown_layer_is_refused_with_those_there_are(self, small: Graph) -> None:
        with pytest.raises(PlanError, match=r"no layer 'pol'.*conv1.*pool"):
            plan_graph(small, 2, layout="auto", groups=["pol"])

    def test_a_model_without_operators_is_refused(self) -> None:
        nothing = export(nn.Identity(), (torch.zeros(1, 3, 4, 4),)).graph
        with pytest.raises(PlanError, match="no operators"):
            plan_graph(nothing, 2, layout="auto", groups="auto")

    def test_every_plan_can_be_lowered(self, small: Graph) -> None:
        for groups in ("each", "one", 2, ["act1", "conv2"]):
            plan = plan_graph(small, 3, layout="tiles:1x3", groups=groups)
            assert lower(small, plan).plan == plan

    def test_a_plan_for_another_graph_is_not_lowered(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="auto", groups="one")
        with pytest.raises(PlanError, match="was made for model"):
            lower(graph((2, 3, 24, 12)), plan)


class TestRetarget:
    def test_the_same_graph_keeps_its_plan(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="auto", groups=2)
        assert retarget(plan, small, Graph.from_json(small.to_json())) is plan

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("shape", [(2, 3, 20, 12), (1, 3, 41, 33)])
    @pytest.mark.parametrize("groups", ["each", "one", 2, ["pool", "conv2"]])
    def test_groups_hold_the_same_windows(
        self, small: Graph, groups: Any, shape: tuple[int, ...], training: bool
    ) -> None:
        plan = plan_graph(small, 2, layout="tiles:2,1x1", groups=groups)
        other = graph(shape, training=training)
        moved = retarget(plan, small, other)
        assert moved.graph == other.digest
        assert heads(other, moved) == heads(small, plan)
        assert {str(group.layout) for group in moved.groups} == {"tiles:2,1x1"}
        lower(other, moved)

    def test_a_graph_with_fewer_windows_still_gets_a_plan(self, small: Graph) -> None:
        plan = plan_graph(small, 2, layout="auto", groups="each")
        other = export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.zeros(1, 3, 9, 9),))
        moved = retarget(plan, small, other.graph)
        assert lower(other.graph, moved).plan.groups[-1].last == other.graph.nodes[-1].output


class TestWishes:
    def test_without_a_profile_open_means_tiles(self, small: Graph) -> None:
        plan = Wishes().plan(small, 3)
        assert {group.layout for group in plan.groups} == {best_grid(small, 3)}

    def test_with_a_profile_open_means_searched(self, small: Graph) -> None:
        wishes = Wishes(profile=profile(3))
        assert wishes.plan(small, 3) == wishes.search(small, 3).best.plan

    @pytest.mark.parametrize("asked", [{"groups": "one"}, {"passes": 2}])
    def test_what_was_asked_for_is_not_searched(self, small: Graph, asked: dict[str, Any]) -> None:
        assert Wishes(**asked, profile=profile(3)).plan(small, 3) == Wishes(**asked).plan(small, 3)

    def test_in_a_layout_that_was_asked_for_borders_are_searched(self, small: Graph) -> None:
        found = Wishes(layout="tiles:3x1", profile=profile(3, latency_s=0.1)).plan(small, 3)
        assert {str(group.layout) for group in found.groups} == {"tiles:3x1"}
        assert len(found.groups) == 1, "every exchange takes longer than all the rest"

    def test_a_profile_of_other_devices_is_refused(self, small: Graph) -> None:
        with pytest.raises(PlanError, match="profile is of 2 devices, the plan is for 3"):
            Wishes(profile=profile(2)).plan(small, 3)

    def test_an_unknown_objective_is_refused(self) -> None:
        with pytest.raises(UsageError, match="objective='energy'"):
            Wishes(objective="energy")

    def test_room_is_what_the_smallest_device_has_left(self) -> None:
        assert room_bytes(profile(2, memory_bytes=SMALL_IDLE_BYTES + 1000)) == 1000
        assert room_bytes(profile(2, memory_bytes=SMALL_BYTES)) == SMALL_BYTES - IDLE_BYTES
        assert room_bytes(profile(2, memory_bytes=0)) == 0

    def test_devices_too_small_for_the_fastest_plan_get_one_that_fits(self) -> None:
        many = [nn.Conv2d(3, 8, 3), *(nn.Conv2d(8, 8, 3) for _ in range(4)), nn.Flatten()]
        large = export(nn.Sequential(*many), (torch.zeros(4, 3, 256, 256),)).graph
        slow = {"mbit_per_s": 0.01}  # sending costs so much that every device computes everything
        most = max(Wishes(profile=profile(2, **slow)).search(large, 2).best.prediction.memory_bytes)
        tight = profile(2, **slow, memory_bytes=SMALL_IDLE_BYTES + int(0.9 * most))
        found = Wishes(profile=tight).search(large, 2).best.prediction
        assert max(found.memory_bytes) <= 0.9 * most


class TestKeptProfiles:
    def keep(self, folder: Path, name: str, graph: Graph, **changes: Any) -> None:
        devices, torch_, when = (
            changes.get("devices", 2),
            changes.get("torch", Machine.here().torch),
            changes.get("measured_s", 1.0),
        )
        key = {"model": graph.digest, "torch": torch_, "devices": "somewhere", **measured_by()}
        key |= changes.get("key", {})
        found = replace(profile(devices), key=key, measured_s=when)
        found.save(folder / "terrazzo" / "profiles" / f"{name}.json")

    def test_the_newest_that_fits_is_taken(self, small: Graph, tmp_path: Path) -> None:
        environment = {"XDG_CACHE_HOME": str(tmp_path)}
        assert kept_profile(small, 2, environment=environment) is None
        self.keep(tmp_path, "old", small, measured_s=1.0)
        self.keep(tmp_path, "new", small, measured_s=2.0)
        self.keep(tmp_path, "three", small, measured_s=3.0, devices=3)
        self.keep(tmp_path, "torch", small, measured_s=4.0, torch="1.0")
        self.keep(tmp_path, "model", graph((1, 3, 8, 40)), measured_s=5.0)
        self.keep(tmp_path, "way", small, measured_s=6.0, key={"profile version": "3.4"})
        self.keep(tmp_path, "release", small, measured_s=7.0, key={"terrazzo": "0.0.1"})
        (tmp_path / "terrazzo" / "profiles" / "broken.json").write_text("{")
        found = kept_profile(small, 2, environment=environment)
        assert found is not None
        assert found.measured_s == 2.0

    def test_a_profile_may_be_a_file(self, small: Graph, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        profile(2).save(path)
        for given in (path, str(path), profile(2)):
            assert given_profile(given, small) == profile(2)
        closed = informed(Wishes(groups="one"), profile(2), graph=small, devices=2)
        assert closed.profile is None, "nothing is left to search for"

    def test_a_profile_says_for_how_many_devices_a_plan_is(self) -> None:
        x = torch.zeros(2, 3, 20, 12)
        assert tz.plan(model(), (x,), profile=profile(3)).devices == 3
        with pytest.raises(PlanError, match="the profile is of 3 devices, the plan is for 1"):
            tz.plan(model(), (x,), profile=profile(3), devices=1)

    def test_the_least_memory_is_not_found_without_a_profile(self) -> None:
        for given in ({}, {"groups": "each", "profile": profile(2)}):
            with pytest.raises(UsageError, match='objective="memory" is searched for: it needs'):
                tz.plan(
                    model(), (torch.zeros(2, 3, 20, 12),), devices=2, objective="memory", **given
                )


class TestDelivery:
    def test_the_way_of_the_input_is_part_of_a_step(self) -> None:
        """On a slow link, to send all of the input to all devices is dear."""
        known = profile(2, mbit_per_s=1.0)
        found = {
            name: tz.plan(model(), (torch.zeros(2, 3, 64, 64),), devices=2, profile=known, **given)
            for name, given in {"usual": {}, "none": {"delivery": "none"}}.items()
        }
        assert [group.layout.is_whole for group in found["none"].groups] == [True]
        assert not any(group.layout.is_whole for group in found["usual"].groups)

    def test_an_unknown_one_is_refused(self) -> None:
        with pytest.raises(UsageError, match="say one of uint8, float32, none"):
            tz.plan(model(), (torch.zeros(2, 3, 64, 64),), devices=2, delivery="jpeg")

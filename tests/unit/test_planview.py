"""What a plan looks like to people: every group with its own cut."""

from __future__ import annotations

import torch
from torch import nn

from terrazzo.geometry import Box
from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
from terrazzo.records import Layout, Plan
from terrazzo.report.planview import cut_text, view


def test_every_group_shows_its_own_cut() -> None:
    model = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.Conv2d(7, 5, 3, padding=1))
    graph = export(model, (torch.randn(2, 3, 11, 8),)).graph
    plan = plan_graph(graph, 3, layout="tiles:3x1", groups=["0", "2"])
    first, *_, last = plan.groups
    other = type(last)(last.last, Layout.parse("channels:3"), last.title)
    mixed = Plan(plan.graph, plan.devices, (first, *plan.groups[1:-1], other))
    shown = view(graph, mixed)
    assert shown is not None
    assert shown.groups[0].cut == "rows 4 3 4"
    assert shown.groups[-1].cut == "channels 2 1 2"


def test_words_for_cuts() -> None:
    assert cut_text([Box.whole((1, 2, 3, 4))] * 2) == ""
    halves = [Box(((0, 2), (0, 4), (0, 6), (0, 6))), Box(((2, 4), (0, 4), (0, 6), (0, 6)))]
    assert cut_text(halves) == "images 2 each"
    assert cut_text([Box(((0, 2),)), Box(((2, 3),))]) == "dimension 0 2 1"

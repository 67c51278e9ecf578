"""What a plan looks like to people: every group with its own cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrazzo.geometry import Box
from terrazzo.graph.export import export
from terrazzo.planner import plan_graph
from terrazzo.records import Layout, Plan
from terrazzo.report import canvas
from terrazzo.report.planview import cut_text, shortened, view
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show_plan
from terrazzo.schedule.tiling import owned


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


def drawn(layout: str, shape: tuple[int, ...] = (4, 12, 8, 8)) -> list[str]:
    axes = "nchw"[: len(shape)]
    return canvas.parts(owned(shape, axes, Layout.parse(layout)), width=41)


def test_every_kind_of_cut_is_drawn_with_all_devices() -> None:
    assert drawn("channels:1,3") == [
        "┌─────────┬─────────────────────────────┐",
        "│0        │1                            │",
        "└─────────┴─────────────────────────────┘",
        " 3 ch      9 ch",
    ]
    assert drawn("samples:2+tiles:2x1") == [
        "┌───────────────────┬───────────────────┐",
        "│0                  │2                  │",
        "├───────────────────┼───────────────────┤",
        "│1                  │3                  │",
        "└───────────────────┴───────────────────┘",
        " 2 img               2 img",
    ]
    assert drawn("tiles:1x0,1") == [
        "┌───────────────────────────────────────┐",
        "│1                                      │",
        "└───────────────────────────────────────┘",
    ]
    assert drawn("channels:2", (4, 12))[-1] == " 6 ch                6 ch"


def test_a_plan_is_shown_by_its_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """Devices whose channels are cut lie over each other in the input: it is not drawn."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
    graph = export(model, (torch.randn(2, 3, 16, 16),)).graph
    plan = plan_graph(graph, 3, layout="channels:0,1,1", groups="one")
    show_plan(view(graph, plan), Screen(width=70))
    out = capsys.readouterr().out
    assert "channels:0,1,1; without device 0" in out
    assert "│1 " in out and "│2 " in out and "3 ch" in out
    assert "beyond its tile" not in out
    whole = plan_graph(graph, 3, layout="whole", groups="one")
    show_plan(view(graph, whole), Screen(width=70))
    assert "whole: every device makes all of it" in capsys.readouterr().out


def test_long_titles_are_shortened_and_short_ones_stay() -> None:
    assert shortened("backbone.fine.3.0..backbone.fine.4") == "backbone.fine.3.0..4"
    assert shortened("16.0..16.2") == "16.0..16.2"

"""Plans for the least energy: devices, modes and layouts chosen together."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from torch import nn

from terrazzo.cli.main import main
from terrazzo.cli.thrift import modes_of
from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import export
from terrazzo.planner import Wishes
from terrazzo.planner.cost import predict
from terrazzo.planner.feedback import slowed
from terrazzo.planner.guess import Figures, guessed
from terrazzo.planner.search import ENERGY, TIME, Found, search
from terrazzo.planner.thrift import step_joules, subsets, thrifty
from terrazzo.records import Graph
from terrazzo.records.devicepower import PlanMode, load_modes
from terrazzo.records.profile import Profile
from terrazzo.schedule import lower
from terrazzo.schedule.training import Training

FAST = (PlanMode("full", 1.0, 12.0, 5.0), PlanMode("half", 2.0, 4.5, 2.5))
SLOW = (PlanMode("full", 1.0, 4.0, 2.0),)
GIGABIT = 1.2e8


@cache
def graph() -> Graph:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    return export(model, (torch.zeros(4, 3, 320, 320),)).graph


def cluster(*flops_per_s: float) -> Profile:
    rows = [Figures(f"d-{n}", flops, 4 << 30, GIGABIT) for n, flops in enumerate(flops_per_s)]
    return guessed(rows)


def searched(profile: Profile) -> Found:
    return search(graph(), profile)


def test_a_step_costs_busy_and_idle_watts():
    profile = cluster(8e9, 8e9)
    found = searched(profile).best.prediction
    modes = [PlanMode("", 1.0, 10.0, 3.0), PlanMode("", 1.0, 6.0, 1.0)]
    busy = found.compute_s
    expected = sum(
        mode.busy_w * busy[n] + mode.idle_w * (found.step_s - busy[n])
        for n, mode in enumerate(modes)
    )
    assert step_joules(found, modes) == pytest.approx(expected)


def test_gradients_of_frozen_layers_take_no_energy():
    wishes = Wishes(training=Training(frozen=frozenset({"0.weight", "0.bias"})))
    profile, powers = cluster(16e9, 6e9), [FAST, SLOW]
    usual, _ = thrifty(graph(), profile, powers, search=searched)
    best, _ = thrifty(
        graph(), profile, powers, prices=wishes.prices,
        search=lambda part: replace(wishes, profile=part).search(graph(), len(part.devices)),
    )  # fmt: skip
    assert best.step_j < 0.8 * usual.step_j
    again = predict(lower(graph(), best.tried.plan), wishes.prices(best.profile), memory=False)
    assert best.step_s == again.step_s


def test_as_good_as_trying_everything():
    """Every set of devices in every combination of modes, each with a plan of its own."""
    profile, powers = cluster(16e9, 6e9), [FAST, SLOW]
    best, rest = thrifty(graph(), profile, powers, search=searched)
    every = []
    for count in (1, 2):
        for places in combinations(range(2), count):
            for modes in product(*(powers[place] for place in places)):
                part = slowed(profile.of(places), [mode.slowness for mode in modes])
                every.append(step_joules(searched(part).best.prediction, modes))
    assert best.step_j == pytest.approx(min(every), rel=0.02)
    assert all(other.step_j >= best.step_j for other in rest)
    assert best.mean_w <= best.peak_w


def test_a_fast_device_is_slowed_down_where_it_would_wait():
    """Its calm mode takes as long as the others do anyway, for a fraction of the power."""
    eager = (PlanMode("full", 1.0, 30.0, 12.0), PlanMode("calm", 4.0, 5.0, 2.5))
    profile = cluster(32e9, 8e9)
    best, rest = thrifty(graph(), profile, [eager, SLOW], search=searched)
    both = next(choice for choice in (best, *rest) if choice.places == (0, 1))
    assert both.modes[0].title == "calm"


def test_a_budget_is_kept_by_modes_or_by_fewer_devices():
    profile, powers = cluster(16e9, 16e9, 6e9), [FAST, FAST, SLOW]
    free, _ = thrifty(graph(), profile, powers, search=searched, objective=TIME)
    assert free.peak_w > 20
    for budget_w in (20.0, 9.0, 4.2):
        best, _ = thrifty(
            graph(), profile, powers, search=searched, objective=TIME, budget_w=budget_w
        )
        assert best.peak_w <= budget_w
        assert best.step_s >= 0.99 * free.step_s
    with pytest.raises(PlanError, match=r"within 3 W: .* draws 4 W"):
        thrifty(graph(), profile, powers, search=searched, objective=ENERGY, budget_w=3.0)


def test_devices_that_are_alike_are_looked_at_once():
    assert subsets(cluster(8e9, 8e9, 8e9), [SLOW] * 3) == [(0, 1, 2), (0, 1), (0,)]
    mixed = subsets(cluster(16e9, 6e9), [FAST, SLOW])
    assert (0, 1) in mixed and (0,) in mixed


def test_power_tables_name_devices_kinds_or_all(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text(
        "device,mode,slowness,busy_w,idle_w\n"
        "pi5,slow,1.5,5,2\npi5,full,1,9,4\npi5-1,special,1,8,3\n*,any,1,6,2\n"
    )
    first, second, third = load_modes([str(path)], ["pi5-0", "pi5-1", "nano"])
    assert [mode.title for mode in first] == ["full", "slow"]
    assert [mode.title for mode in second] == ["special"]
    assert [mode.title for mode in third] == ["any"]
    for text, words in (
        ("device,mode\n", "needs the columns"),
        ("device,mode,slowness,busy_w,idle_w\npi5,x,1,2,3\n", "idle not above busy"),
        ("device,mode,slowness,busy_w,idle_w\npi5,x,1,,3\n", "lacks a number"),
        ("device,mode,slowness,busy_w,idle_w\npi5,x,1,4,3\n", "says nothing of nano"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            load_modes([str(path)], ["nano"])


def test_a_profile_with_watts_needs_no_table():
    known = [
        replace(device, busy_w=9.0 + place, idle_w=3.0, is_metered=True)
        for place, device in enumerate(cluster(16e9, 6e9).devices)
    ]
    profile = replace(cluster(16e9, 6e9), devices=tuple(known))
    assert Profile.from_json(profile.to_json()) == profile
    modes, is_measured = modes_of(Namespace(power=[]), profile, ())
    assert is_measured
    assert [(row.busy_w, row.idle_w, row.mode) for (row,) in modes] == [
        (9.0, 3.0, None), (10.0, 3.0, None)
    ]  # fmt: skip
    with pytest.raises(UsageError, match="cluster profile, or give --power"):
        modes_of(Namespace(power=[]), cluster(16e9, 6e9), ())


def test_the_command_shows_devices_modes_and_energy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Conv2d(3, 8, 3, padding=1)\n"
    )
    command = ["plan", f"{tmp_path / 'net.py'}:build", "--input", "2x3x32x32"]
    assert main([*command, "--on", "1xpi5,1xpi3", "--objective", "energy"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Energy of a step" in text and "(estimated)" in text
    assert "as it comes" in text
    assert main([*command, "--on", "2xpi3", "--power-budget", "6W"]) == 0
    assert "Left out, and counted as switched off: pi3-1" in capsys.readouterr().out
    assert main([*command, "--on", "2", "--objective", "energy"]) == 2
    assert "seconds and watts" in capsys.readouterr().err

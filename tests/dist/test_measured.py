"""Devices on several machines that nobody has measured yet measure themselves, once."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import run_on
from plain import cnn

import terrazzo as tz
from terrazzo import api, planning
from terrazzo.errors import RunError
from terrazzo.measure import device as measured_device
from terrazzo.measure import together
from terrazzo.records.profile import Profile

NETS = 2


def fails(*_: Any) -> Any:
    raise RunError("no clock")


def planned(folder: str, apart: bool, failing: int, setting: str) -> dict[str, Any]:
    """The same net twice; all processes of a test are on one machine, so ``apart`` is told."""
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    said = []
    changed = {"XDG_CACHE_HOME": folder, planning.MEASURE: setting}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, changed))
        patches.enter_context(mock.patch.object(planning, "MEASURE_S", 0.5))
        patches.enter_context(mock.patch.object(planning, "are_apart", return_value=apart))
        for _ in range(NETS):
            text = io.StringIO()
            with contextlib.redirect_stderr(text):
                device = tz.init()
                if device == failing:
                    patches.enter_context(mock.patch.object(together, "measure_device", fails))
                net = tz.parallelize(cnn(), (x,))
            said.append(text.getvalue())
    x = net.links.broadcast(x)
    off = (net(x) - cnn()(x)).abs().max().item()
    return {"said": said, "off": off, "profile": isinstance(net._plans.profile, Profile)}


def in_double(folder: str) -> dict[str, Any]:
    """As scripts that count in float64 begin."""
    torch.set_default_dtype(torch.float64)
    try:
        return planned(folder, True, -1, "") | {"dtype": str(torch.get_default_dtype())}
    finally:
        torch.set_default_dtype(torch.float32)


def beside_another(folder: str, which: int) -> dict[str, Any]:
    """As a device whose weights lie where nothing can be timed asks for its plan."""

    def unmeasurable(*args: Any, **options: Any) -> planning.Planner:
        return planning.Planner(*args, **options | {"measures": False})

    if tz.init() != which:
        return planned(folder, True, -1, "")
    with mock.patch.object(api, "Planner", unmeasurable):
        return planned(folder, True, -1, "")


def test_a_profile_is_made_once_and_kept(tmp_path: Path) -> None:
    first, second = run_on(2, planned, str(tmp_path), True, -1, "")
    assert first["off"] < 1e-10 and second["off"] < 1e-10
    assert "were not measured with this model yet" in first["said"][0]
    assert "measured, and kept as" in first["said"][0]
    assert "a step predicted" in first["said"][0]
    assert first["said"][1] == "", "the second net knows it"
    assert second["said"] == ["", ""], "one device speaks for all"
    (path,) = (tmp_path / "terrazzo" / "profiles").glob("*.json")
    kept = Profile.load(path)
    assert [device.name for device in kept.devices] == ["device0", "device1"]
    assert kept.network is not None and len(kept.network.links) == 2
    assert all(device.timings for device in kept.devices)
    assert first["profile"], "and plans by it"


def test_what_torch_makes_by_default_is_not_measured_with(tmp_path: Path) -> None:
    first, second = run_on(2, in_double, str(tmp_path))
    assert "measured, and kept as" in first["said"][0]
    assert first["dtype"] == second["dtype"] == "torch.float64", "a script's default is its own"


def test_who_cannot_measure_does_not_stop_a_training(tmp_path: Path) -> None:
    first, second = run_on(2, planned, str(tmp_path), True, 1, "")
    assert first["off"] < 1e-10 and second["off"] < 1e-10
    assert "measuring failed (device1: no clock)" in first["said"][0]
    assert not (tmp_path / "terrazzo").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_nobody_measures_where_one_cannot(tmp_path: Path, which: int) -> None:
    for found in run_on(2, beside_another, str(tmp_path), which):
        assert found["off"] < 1e-10 and found["said"] == ["", ""]
    assert not (tmp_path / "terrazzo").exists()


def on_another(folder: str) -> tuple[list[str], list[str]]:
    """As if device 1 had been moved to a GPU since the profile was kept, and asks twice."""
    with contextlib.ExitStack() as patches:
        if tz.init() == 1:
            for module in (planning, measured_device):
                patches.enter_context(mock.patch.object(module, "title", return_value="A GPU"))
        found = planned(folder, True, -1, "")
    kept = sorted((Path(folder) / "terrazzo" / "profiles").glob("*.json"))
    profiles = [Profile.load(path) for path in kept]
    return found["said"], [";".join(one.accelerator for one in p.devices) for p in profiles]


def test_a_device_that_moved_to_a_gpu_is_measured_there(tmp_path: Path) -> None:
    run_on(2, planned, str(tmp_path), True, -1, "")
    (said, kept), _ = run_on(2, on_another, str(tmp_path))
    assert "were not measured with this model yet" in said[0]
    assert said[1] == "", "now that profile is known"
    assert sorted(kept) == [";", ";A GPU"], "and the other one is still there"


def test_nobody_measures_on_one_machine_or_where_it_is_off(tmp_path: Path) -> None:
    for apart, setting in ((False, ""), (True, "off")):
        found = run_on(2, planned, str(tmp_path), apart, -1, setting)
        assert all(one["said"] == ["", ""] for one in found)
    assert not (tmp_path / "terrazzo").exists()

"""From a run back to planning: a real run of two devices, its prediction, its next profile."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from terrazzo.cli.main import main
from terrazzo.errors import PlanError
from terrazzo.graph.export import export
from terrazzo.measure.key import measured_by
from terrazzo.measure.known import kept_profile
from terrazzo.measure.store import ProfileStore
from terrazzo.planner.alike import NEAR
from terrazzo.planner.cost import predict
from terrazzo.planner.feedback import slowed
from terrazzo.planner.guess import Figures, guessed
from terrazzo.planner.prices import speed
from terrazzo.records import Graph, Plan
from terrazzo.records.machine import Machine
from terrazzo.records.prediction import Prediction
from terrazzo.records.profile import Profile
from terrazzo.report.outcome import outcome
from terrazzo.report.page import page
from terrazzo.report.reading import Reading
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show
from terrazzo.schedule import lower

sys.path.insert(0, str(Path(__file__).parent))
import clusters

pytestmark = pytest.mark.timeout(240)

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
x = torch.randn(2, 3, 24, 20)
"""
SCRIPT = f"""
import sys
import terrazzo as tz

tz.init()
{MODEL}
net = tz.parallelize(model, (x,), layout="tiles:2x1", groups=2, profile="profile.json")
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(1, 8):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and "change" in sys.argv:
        net.change_plan(tz.plan(net, (x,), layout="channels:2", groups="each"), optimizer)
"""


def profile() -> Profile:
    found = guessed([Figures(f"d{i}", 1e9, 1 << 30, 1e7) for i in range(2)])
    key = {"model": digest(), "devices": "2 local", "torch": Machine.here().torch, **measured_by()}
    return replace(found, key=key)


@cache
def digest() -> str:
    """What profiles of the script's model are kept under."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return export(names["model"], (names["x"],)).graph.digest


def run(place: Path, *words: str) -> Path:
    """A recorded run of the script; gives its folder."""
    (place / "train.py").write_text(SCRIPT)
    profile().save(place / "profile.json")
    command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "2", "train.py", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "runs").iterdir()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("desk"))


def test_a_run_keeps_what_was_predicted_of_it(folder: Path) -> None:
    graph = Graph.from_json((folder / "graph.json").read_text())
    plan = Plan.from_json((folder / "plan.json").read_text())
    found = Prediction.from_json((folder / "prediction.json").read_text())
    assert found == predict(lower(graph, plan), profile())
    assert Profile.load(folder / "profile.json") == profile()
    assert len(found.groups) == len(plan.groups) == 2


def test_every_group_and_device_is_held_against_its_prediction(folder: Path) -> None:
    reading = Reading.open(folder)
    found = outcome(reading)
    assert found is not None and found.steps == 6  # the first of seven warms up
    assert reading.prediction is not None
    for group, cost in zip(found.groups, reading.prediction.groups, strict=True):
        assert tuple(figure.predicted_s for figure in group.compute) == cost.compute_s
        assert all(figure.measured_s > 0 for figure in group.compute)
    for device in range(2):
        parts = [group.compute[device].measured_s for group in found.groups]
        whole = found.total.compute[device].measured_s
        assert max(parts) < whole < found.step.measured_s
        # Of every step, what was computed in groups is what its spans say, with nothing lost.
        for step in reading.planned_steps:
            spans = [span for span in step.spans if span.device == device]
            computed = sum(span.worked_s for span in spans if span.kind != "agree")
            assert step.split(device)["compute"] == pytest.approx(computed, rel=1e-6)
    moving = [figure.measured_s for figure in found.groups[1].moving]
    assert all(seconds > 0 for seconds in moving)


def test_the_report_says_it(folder: Path) -> None:
    reading, out = Reading.open(folder), io.StringIO()
    show(reading, Screen(out, width=100))
    text = out.getvalue()
    assert "Predicted and measured" in text
    assert re.search(r"device 1: computing \S+ \S+ for \S+ \S+ \([\d.]+x\), moving", text)
    assert re.search(r"^  1 .+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)
    assert "device 1 computing" in page(reading)


def test_a_run_without_a_prediction_is_reported_without(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.name != "prediction.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert outcome(Reading.open(tmp_path)) is None
    assert "Predicted and measured" not in page(Reading.open(tmp_path))


def test_the_next_profile_is_what_the_run_took(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cluster", "profile", "--from", str(folder), "--save", f"{tmp_path}/p.json"]) == 0
    assert "d1 computes" in capsys.readouterr().err
    after = Profile.load(tmp_path / "p.json")
    store = ProfileStore.usual(os.environ)
    assert store.find(profile().key).profile == after
    assert after.measured_s > profile().measured_s
    graph = Graph.from_json((folder / "graph.json").read_text())
    plan = Plan.from_json((folder / "plan.json").read_text())
    found = outcome(Reading.open(folder))
    assert found is not None
    again = predict(lower(graph, plan), after).net_compute_s
    took = [figure.measured_s for figure in found.total.compute]
    assert sum(again) == pytest.approx(sum(took), rel=0.02)
    for predicted_s, took_s in zip(again, took, strict=True):  # nearly equal ones count as equals
        assert predicted_s == pytest.approx(took_s, rel=NEAR)
    assert graph.digest == digest()
    assert kept_profile(graph, 2, environment=os.environ) == after  # the next run plans with it


def test_a_run_on_a_gpu_corrects_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first, *others = profile().devices
    moved = replace(profile(), devices=(replace(first, accelerator="A GPU"), *others))
    moved.save(tmp_path / "profile.json")
    assert main(["cluster", "profile", "--from", str(tmp_path)]) == 2
    assert "lay on A GPU" in capsys.readouterr().err


def test_a_guess_is_not_kept(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    replace(profile(), key={"devices": "2 guessed"}).save(tmp_path / "profile.json")
    assert main(["cluster", "profile", "--from", str(tmp_path)]) == 2
    assert "is a guess" in capsys.readouterr().err
    assert main(["cluster", "profile", "--from", str(tmp_path), "--save", f"{tmp_path}/p"]) == 0


def test_nothing_to_learn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events-0.jsonl").write_text("")
    assert main(["cluster", "profile", "--from", str(tmp_path)]) == 2
    assert "says nothing to correct a profile by" in capsys.readouterr().err


def test_after_a_change_of_plans_the_last_one_counts(tmp_path: Path) -> None:
    folder = run(tmp_path, "change")
    reading = Reading.open(folder)
    assert reading.plan_changes == (3,)
    assert [step.call for step in reading.planned_steps] == [4, 5, 6, 7]
    first = Plan.from_json((folder / "plan-1.json").read_text())
    assert (len(first.groups), str(first.groups[0].layout)) == (2, "tiles:2x1")
    assert reading.plan is not None and str(reading.plan.groups[0].layout) == "channels:2"
    found = outcome(reading)
    assert found is not None and found.steps == 4
    assert len(found.groups) == len(reading.plan.groups) > 2
    out = io.StringIO()
    show(reading, Screen(out, width=100))
    assert "Plans were changed after call 3" in out.getvalue()


def test_a_slowed_profile_is_slower_in_everything_that_is_computed() -> None:
    before = clusters.profile(3)
    after = slowed(before, (1.0, 2.0, 0.5))
    assert after.devices[0] == before.devices[0]
    speeds = [speed(b) / speed(a) for a, b in zip(after.devices, before.devices, strict=True)]
    assert speeds == pytest.approx([1.0, 2.0, 0.5])
    assert after.devices[1].copy_bytes_per_s == before.devices[1].copy_bytes_per_s / 2
    assert after.network == before.network and after.key == before.key
    for factors in ((1.0, 1.0), (1.0, 1.0, 0.0)):
        with pytest.raises(PlanError, match="one positive factor for each device"):
            slowed(before, factors)

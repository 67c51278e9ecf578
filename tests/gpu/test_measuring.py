"""Measuring on a GPU: work is timed to its end, nets plan by what they find, and numbers stay."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import run_on
from plain import assert_close, batches, cnn, state, train
from torch import nn

import terrazzo as tz
from terrazzo import planning
from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.graph.export import export
from terrazzo.measure.accelerator import give_back, identity, room_bytes, title
from terrazzo.measure.device import Terms, measure_device, warm_up
from terrazzo.measure.kin import kin
from terrazzo.measure.links import measure_network
from terrazzo.measure.rehearsal import Rehearsal, rehearsed
from terrazzo.measure.stopwatch import Launches, Stopwatch, backward_thread
from terrazzo.measure.timing import free_accelerator, time_trial
from terrazzo.measure.trials import trials
from terrazzo.records import Graph
from terrazzo.records.profile import DeviceProfile, Network, Profile, device_from, network_from
from terrazzo.runtime.links import Links, connect

sys.path.insert(0, str(Path(__file__).parent))
from places import ALIKE, GPU, MIXED, REVERSED, here, moved

CUDA = torch.device(GPU)
MODEL = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )
"""


def graph() -> Graph:
    space: dict[str, Any] = {}
    exec(MODEL, space)
    return export(space["build"](), (torch.zeros(2, 3, 40, 40),)).graph


# ---- alone ------------------------------------------------------------------------------------


def by_events_s(call: Any, *, times: int = 10) -> float:
    """Seconds of one call, as the GPU itself tells."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / times


class TestStopwatch:
    def test_it_agrees_with_the_clock_of_the_gpu(self) -> None:
        weight = torch.rand(4096, 4096, device=GPU, dtype=torch.float64)
        product = torch.empty_like(weight)

        def call() -> None:
            torch.mm(weight, weight, out=product)

        right_s = by_events_s(call)
        found_s = Stopwatch(1, CUDA).seconds(call)
        assert 0.6 * right_s < found_s < 1.6 * right_s
        assert Launches(CUDA).seconds(call) < 0.5 * right_s, "launching it takes less"

    def test_gradients_are_made_in_another_thread(self) -> None:
        assert backward_thread(CUDA) != threading.get_ident()

    def test_every_trial_runs(self) -> None:
        layers = (
            nn.Conv2d(4, 8, 3, groups=4), nn.GroupNorm(2, 8), nn.Hardswish(), nn.AvgPool2d(3, 2, 1),
            nn.InstanceNorm2d(8, affine=True), nn.Dropout(0.3), nn.Upsample(scale_factor=2),
            nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Sigmoid(), nn.Conv2d(8, 8, 3, groups=8),
            nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.LeakyReLU(0.1),
        )  # fmt: skip
        several = export(nn.Sequential(*layers), (torch.zeros(2, 4, 24, 24),)).graph
        timed = [time_trial(trial, Stopwatch(1, CUDA)) for trial in trials(several)]
        assert len(timed) > 30
        assert all(1e-6 < timing.forward_s < 1 for timing in timed)
        free_accelerator(CUDA)


def test_measuring_counts_no_tf32_and_leaves_the_scripts_choice() -> None:
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        terms = Terms("here", 1 << 30, 2.0, torch_device=CUDA)
        found = measure_device(
            graph(), terms, lambda _: seen.append(torch.get_float32_matmul_precision())
        )
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.accelerator == title(CUDA)
    assert torch.cuda.get_device_name() in found.accelerator
    assert f"CUDA {torch.version.cuda}" in found.accelerator
    assert (found.memory_bytes, found.saved_s) == (1 << 30, 0.0)


def test_what_is_free_is_what_a_net_may_take() -> None:
    def beyond_free_bytes() -> int:
        room = room_bytes(Links(), CUDA)
        free, total = torch.cuda.mem_get_info()
        assert 0 < room <= total
        return room - free

    give_back(CUDA)
    before = beyond_free_bytes()
    held = torch.zeros(256 << 20, dtype=torch.uint8, device=GPU)
    more = beyond_free_bytes() - before
    assert 192 << 20 < more < 320 << 20, "what it holds itself is a part of it"
    del held


# ---- together ---------------------------------------------------------------------------------


def measured(text: str, places: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    told, links, place = Graph.from_json(text), connect(), here(places)
    warm_up(place)
    room = room_bytes(links, place)
    terms = Terms("d", room or 1 << 30, 6.0, kin(links, place), place)
    rehearsal = Rehearsal(links, place)
    own = rehearsed(measure_device(told, terms, lambda _: None), rehearsal, links, lambda _: None)
    network = measure_network(links, lambda _: None, place)
    free_accelerator(place)
    return asdict(own), asdict(network), identity(place)


@pytest.mark.parametrize("places", [ALIKE, MIXED])
def test_devices_measure_where_their_nets_lie(places: str) -> None:
    answers = run_on(2, measured, graph().to_json(), places)
    devices: list[DeviceProfile] = [device_from(own) for own, _, _ in answers]
    networks: list[Network] = [network_from(network) for _, network, _ in answers]
    accelerators = ["" if place == "cpu" else title(CUDA) for place in places.split(",")]
    assert [device.accelerator for device in devices] == accelerators
    assert networks[0] == networks[1]
    for device, accelerator in zip(devices, accelerators, strict=True):
        families = {timing.load.family for timing in device.timings}
        assert families >= {"conv2d 3x3 s1", "linear", "moments", "normalize", "relu"}
        assert all(0 < timing.forward_s < 1 for timing in device.timings)
        own = device.own
        assert set(own.steps_s) >= {"Operator", "Compute", "Combine", "Exchange", "Spread"}
        assert 0 <= sum(own.steps_s["Exchange"]) < 1  # what is left without its messages
        assert 0 < own.net_s < 1
        assert device.seconds_per_cpu_s >= 1
        if accelerator:
            assert device.copy_bytes_per_s > 1e10
            assert device.saved_s == 0
    if places == ALIKE:
        total = torch.cuda.mem_get_info()[1]
        assert sum(device.memory_bytes for device in devices) <= total, "they share one GPU"
    for link in networks[0].links:
        assert link.up_bytes_per_s > 1e6 and 0 < link.latency_s < 1
        assert link.message_s > 0


def planned(folder: str, places: str) -> dict[str, Any]:
    """A net that nobody has measured yet, twice, trained; two processes on one GPU are not apart
    by themselves, so that is told."""
    data, place = batches(12), here(places)
    said = []
    changed = {"XDG_CACHE_HOME": folder, planning.MEASURE: ""}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, changed))
        patches.enter_context(mock.patch.object(planning, "MEASURE_S", 4.0))
        if places == ALIKE:
            patches.enter_context(mock.patch.object(planning, "are_apart", return_value=True))
        for _ in range(2):
            text = io.StringIO()
            with contextlib.redirect_stderr(text):
                model = moved(cnn(bias=False), place)
                net = tz.parallelize(model, (data[0][0].to(place),), align_every=4)
            said.append("\n".join(re.findall("^terrazzo: .*", text.getvalue(), re.MULTILINE)))
    plain = cnn(bias=False)
    plain.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (net, plain)]
    losses = train(net, optimizers[0], moved(data, place))
    assert losses == pytest.approx(train(plain, optimizers[1], data), rel=1e-9)
    net.align()
    assert next(net.parameters()).device.type == place.type
    assert_close({name: one.cpu() for name, one in state(net).items()}, state(plain))
    return {"said": said, "profile": isinstance(net._plans.profile, Profile)}


@pytest.mark.parametrize("places", [MIXED, REVERSED, ALIKE])
def test_a_net_measures_itself_plans_and_trains_to_the_same_numbers(
    places: str, tmp_path: Path
) -> None:
    first, second = run_on(2, planned, str(tmp_path), places, timeout_s=240)
    assert "were not measured with this model yet" in first["said"][0]
    assert "measured, and kept as" in first["said"][0]
    assert "a step predicted" in first["said"][0]
    assert first["said"][1] == "", "the second net knows it"
    assert second["said"] == ["", ""]
    assert first["profile"]
    (path,) = (tmp_path / "terrazzo" / "profiles").glob("*.json")
    kept = [device.accelerator for device in Profile.load(path).devices]
    assert kept == ["" if place == "cpu" else title(CUDA) for place in places.split(",")]


def refused(path: str) -> str:
    """A profile of a CPU beside a GPU, given to two nets on the GPU."""
    ((x, _),), place = batches(1), here(ALIKE)
    with pytest.raises(UsageError, match="its net lies on") as caught:
        tz.parallelize(moved(cnn(bias=False), place), (x.to(place),), profile=path)
    return str(caught.value)


def test_a_profile_of_other_processors_is_refused_by_all(tmp_path: Path) -> None:
    run_on(2, planned, str(tmp_path), MIXED, timeout_s=240)
    (path,) = (tmp_path / "terrazzo" / "profiles").glob("*.json")
    told = run_on(2, refused, str(path))
    assert told[0] == told[1]
    assert "device0 was measured on its CPU" in told[0]


def test_the_command_measures_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = "cluster profile net.py:build --input 2x3x40x40 --seconds 5 --save p.json --on 2"
    command = [*words.split(), "--device", "cpu,cuda"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert "measuring: this model was not measured on these devices yet" in err
    assert f"Its net lies on {title(CUDA)}" in " ".join(out.split())
    found = Profile.load(tmp_path / "p.json")
    assert [device.accelerator for device in found.devices] == ["", title(CUDA)]
    assert main(command) == 0
    assert "nothing changed since this was measured" in capfd.readouterr().err
    plan = "plan net.py:build --input 2x3x40x40 --on 2 --device cpu,cuda"
    assert main(plan.split()) == 0
    assert "Predicted" in capfd.readouterr().out
    assert main([*words.split(), "--device", f"cuda:{torch.cuda.device_count()}"]) == 2
    assert "numbered from 0" in capfd.readouterr().err

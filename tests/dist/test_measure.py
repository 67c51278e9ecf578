"""Measuring for real: two processes, their operators and the links between them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import run_on
from torch import nn

from terrazzo.cli.main import main
from terrazzo.cluster import LocalHosts
from terrazzo.errors import RunError
from terrazzo.graph.export import export
from terrazzo.lab.measuring import run_job
from terrazzo.measure.device import Terms, measure_device
from terrazzo.measure.draw import with_watts
from terrazzo.measure.links import measure_network
from terrazzo.measure.rehearsal import Rehearsal, rehearsed
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.timing import time_trial
from terrazzo.measure.trials import MOST_CHEAP, trials
from terrazzo.planner.rates import Rates
from terrazzo.planner.workload import of_node
from terrazzo.records import Graph
from terrazzo.records.power import POWER, emulation
from terrazzo.records.profile import DeviceProfile, Network, Profile, device_from, network_from
from terrazzo.runtime import derivatives
from terrazzo.runtime.convolutions import backward, recorded, winograd
from terrazzo.runtime.links import connect

MODEL = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 4),
    )
"""


def graph(samples: int = 2) -> Graph:
    space: dict[str, Any] = {}
    exec(MODEL, space)
    return export(space["build"](), (torch.zeros(samples, 3, 40, 40),)).graph


def measured(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """On one of several devices."""
    words: list[str] = []
    told, terms = Graph.from_json(text), Terms("d", 1 << 30, 4.0)
    power = {POWER: emulation(2.0, 3.0)}
    links = connect()
    rehearsal = Rehearsal(links)
    own = with_watts(lambda: measure_device(told, terms, words.append), power, links.device)
    own = rehearsed(own, rehearsal, links, words.append)
    network = measure_network(links, words.append)
    assert words[0].startswith("operators: 0 of ")
    return asdict(own), asdict(network)


@pytest.fixture(scope="module")
def found() -> tuple[list[DeviceProfile], list[Network]]:
    answers = run_on(2, measured, graph().to_json())
    return [device_from(own) for own, _ in answers], [network_from(net) for _, net in answers]


class TestDevices:
    def test_every_operator_that_takes_time_is_there(
        self, found: tuple[list[DeviceProfile], list[Network]]
    ) -> None:
        for device in found[0]:
            families = {timing.load.family for timing in device.timings}
            assert families >= {
                "conv2d 3x3 s1", "linear", "batch_norm", "moments", "normalize", "relu",
                "max_pool2d 2x2 s2",
            }  # fmt: skip

    def test_all_figures_are_of_this_world(
        self, found: tuple[list[DeviceProfile], list[Network]]
    ) -> None:
        for device in found[0]:
            assert min(device.calls_s) > 0
            assert min(device.update_s_per_element.values()) > 0
            assert device.copy_bytes_per_s > 0
            assert device.seconds_per_cpu_s >= 1
            assert 1.99 < device.idle_w < device.busy_w and not device.is_metered
            for timing in device.timings:
                assert 0 < timing.forward_s < 10
                if timing.load.is_product:
                    assert timing.backward_input_s and timing.backward_weight_s

    def test_the_runtime_takes_its_part_of_every_kind_of_step(
        self, found: tuple[list[DeviceProfile], list[Network]]
    ) -> None:
        for device in found[0]:
            own = device.own
            assert set(own.steps_s) >= {"Operator", "Compute", "Combine", "Exchange", "Spread"}
            for kind in ("Combine", "Exchange"):
                assert 0 < sum(own.steps_s[kind]) < 1, "there and back, of a tiny network"
            assert 0 < own.net_s < 1 and 0 <= own.weight_s < own.net_s
            assert 0 <= device.saved_s <= 0.2

    def test_predictions_for_the_whole_model_follow(
        self, found: tuple[list[DeviceProfile], list[Network]]
    ) -> None:
        model = graph()
        known = {t.load: t for t in found[0][0].timings}
        rates = Rates(found[0][0])
        loads = [load for node in model.nodes if (load := of_node(node, model)) is not None]
        assert all(rates.seconds(load).forward_s > 0 for load in loads)
        exact = [load for load in loads if load in known and load.is_product]
        assert exact
        for load in exact:
            assert rates.seconds(load).forward_s == pytest.approx(known[load].forward_s, rel=1e-5)


class TestNetwork:
    def test_all_devices_agree_on_it(
        self, found: tuple[list[DeviceProfile], list[Network]]
    ) -> None:
        first, second = found[1]
        assert first == second
        assert len(first.links) == 2
        for link in first.links:
            assert min(asdict(link).values()) > 0
        assert [size for size, _ in first.sums_s] == [1 << 12, 1 << 20, 8 << 20]
        assert all(seconds > 0 for _, seconds in first.sums_s)


class TestTrials:
    def test_products_are_tried_by_rows_and_by_channels(self) -> None:
        tried = {(t.load.rows, t.load.inner, t.load.outer) for t in trials(graph())}
        whole = (2 * 20 * 20, 16 * 9, 32)
        assert whole in tried
        assert (whole[0], whole[1], 16) in tried and (whole[0], whole[1], 5) in tried
        assert (whole[0], 8 * 9, 32) in tried
        assert (2 * 10 * 20 // 2, whole[1], 32) not in tried, "a sample less, before any tile"
        assert (20 * 20, whole[1], 32) in tried

    def test_few_sizes_tell_of_what_is_no_product(self) -> None:
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(9)]
        many = export(nn.Sequential(*layers), (torch.zeros(1, 4, 64, 64),)).graph
        tried = [t.load.reads for t in trials(many) if t.load.family == "relu"]
        assert len(tried) == MOST_CHEAP
        assert max(tried) == 4 * 62 * 62

    def test_every_trial_runs(self) -> None:
        layers = (
            nn.Conv2d(4, 8, 3, groups=4), nn.GroupNorm(2, 8), nn.Hardswish(), nn.AvgPool2d(3, 2, 1),
            nn.InstanceNorm2d(8, affine=True), nn.Dropout(0.3), nn.Upsample(scale_factor=2),
            nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Sigmoid(), nn.Conv2d(8, 8, 3, groups=8),
        )  # fmt: skip
        several = export(nn.Sequential(*layers), (torch.zeros(2, 4, 24, 24),)).graph
        timed = [time_trial(trial, Stopwatch(1)) for trial in trials(several)]
        assert len(timed) > 30
        assert all(timing.forward_s > 0 for timing in timed)

    def test_each_gradient_is_timed_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One node of ours makes both that flow through it, and autograd does not say which."""
        asked: list[list[bool]] = []

        def watched(arguments: Any, wanted: Any) -> Any:
            asked.append([*wanted])
            return backward.gradients(arguments, wanted)

        for module in (recorded, derivatives):
            monkeypatch.setattr(module, "gradients", watched)
        monkeypatch.setattr(winograd, "is_narrow", lambda: True)
        monkeypatch.setattr(winograd, "pays", lambda *_: True)
        one = export(nn.Conv2d(8, 8, 3, padding=1), (torch.zeros(1, 8, 24, 24),)).graph
        for trial in trials(one):
            time_trial(trial, Stopwatch(1))
        assert {tuple(wanted) for wanted in asked} == {(True, False, False), (False, True, True)}

    @pytest.mark.parametrize("stride", [1, 2])
    def test_gradients_are_timed_as_steps_make_them(
        self, stride: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without autograd, also where a convolution makes a row that nobody asks for."""
        asked: list[Any] = []
        monkeypatch.setattr(
            derivatives, "gradients", lambda *given: asked.append(given) or [None] * 3
        )
        one = export(nn.Conv2d(8, 8, 5, stride, padding=2), (torch.zeros(1, 8, 25, 24),)).graph
        for trial in trials(one):
            time_trial(trial, Stopwatch(1))
        assert asked


class TestCommand:
    @pytest.mark.slow
    def test_a_profile_is_made_kept_and_used_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "net.py").write_text(MODEL)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        words = "cluster profile net.py:build --input 2x3x40x40 --seconds 2 --save p.json --on"
        assert main([*words.split(), "2"]) == 0
        out, err = capfd.readouterr()
        assert "measuring: this model was not measured on these devices yet" in err
        assert "conv2d 3x3 s1" in out and "Links" in out
        profile = Profile.load(tmp_path / "p.json")
        assert [device.name for device in profile.devices] == ["device0", "device1"]
        assert profile.network is not None
        assert main([*words.split(), "2"]) == 0
        assert "nothing changed since this was measured" in capfd.readouterr().err
        assert Profile.load(tmp_path / "p.json") == profile
        assert main([*words.split(), "1"]) == 0
        assert "measuring: this model was not measured" in capfd.readouterr().err
        assert Profile.load(tmp_path / "p.json").network is None

    def test_a_device_that_fails_is_named(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(RunError, match=r"measuring did not finish: .*device[01]"):
            run_job(tmp_path / "without a job", LocalHosts(2), lambda text: None)

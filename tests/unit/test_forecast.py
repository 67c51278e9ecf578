"""``terrazzo plan`` with seconds: guessed and measured profiles, what was rejected, what helps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from terrazzo.cli.forecast import faster_devices, faster_links, one_more
from terrazzo.cli.main import main
from terrazzo.planner.cost import predict
from terrazzo.planner.guess import Figures, guessed, is_guess
from terrazzo.planner.prices import Prices, speed
from terrazzo.records import Plan
from terrazzo.records.profile import Profile

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile
from test_cost import graph, lower, plan_graph

MODEL = ("plan", "terrazzo.zoo.yolo:darknet_small", "--input", "2x3x96x96")


@pytest.fixture(autouse=True)
def no_kept_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*MODEL, *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


class TestPlan:
    def test_emulated_kinds_are_guessed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "--on", "2xpi3", "--save", str(tmp_path / "plan.json"))
        assert "Guessed from the figures of these devices" in out
        for word in ("a training step", "pi3-0", "pi3-1", "Bottleneck: ", "room for",
                     "one device alone", "links 2 times", "one more device like"):  # fmt: skip
            assert word in out
        assert Plan.load(tmp_path / "plan.json").devices == 2

    def test_a_measured_profile_is_taken(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "profile.json"
        replace(profile(2), measured_s=1.8e9).save(path)
        out = printed(capsys, "--on", "2", "--profile", str(path))
        assert "From what was measured on 2027-01-15" in out
        assert "d0" in out

    def test_a_layout_that_was_asked_for_is_predicted_as_it_is(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "--on", "2xpi3", "--layout", "tiles:2x1", "--groups", "one")
        assert "50% each" in out
        assert "rejected" not in out

    def test_a_profile_of_other_devices_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "profile.json"
        profile(3).save(path)
        assert main([*MODEL, "--on", "2", "--profile", str(path)]) == 2
        assert "is of 3 devices, --on 2 are 2" in capsys.readouterr().err

    def test_a_limit_is_kept_and_the_least_memory_found(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "--on", "2xpi3", "--memory", "40MiB", "--objective", "memory")
        assert "memory of limit" in out and "40.0 MiB" in out
        assert "more memory" not in out  # what would help is about time

    def test_limits_of_each_device_are_shown_and_what_more_would_give(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "--on", "2xpi3", "--memory", "40MiB,50MiB")
        assert "40.0 MiB" in out and "50.0 MiB" in out
        assert "more memory: " in out

    def test_a_device_that_nothing_fits_into_is_told_what_it_would_take(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        board = "[tiny]\ngflops = 5\nthreads = 1\nmemory_mib = 178\nwire = { mbit = 94 }\n"
        (tmp_path / "boards.toml").write_text(board)
        out = printed(capsys, "--on", "2xtiny", "--presets", str(tmp_path / "boards.toml"))
        assert "this does NOT fit, see below" in out
        assert "No plan fits: a training step needs at least " in out
        assert "what it has beside an idle process: take smaller inputs, another device" in out
        assert "memory=" not in out, "no limit was given that could be raised"

    def test_a_limit_of_one_device_is_named_with_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*MODEL, "--on", "2xpi3", "--memory", "1MiB,900MiB"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert 'MiB" for pi3-0, smaller inputs or more devices' in told


class TestWhatHelps:
    def seconds(self, cluster: Profile) -> float:
        plan = plan_graph(graph(), 4, layout="tiles:2x2", groups="each")
        return predict(lower(graph(), plan), cluster, memory=False).step_s

    def test_faster_parts_make_a_faster_step(self) -> None:
        before = self.seconds(profile(4))
        assert before / 2.2 < self.seconds(faster_devices(profile(4))) < before
        assert before / 2.2 < self.seconds(faster_links(profile(4))) < before

    def test_measured_sums_get_faster_too(self) -> None:
        plain = profile(3)
        assert plain.network is not None
        sums = ((4096, 0.01), (1 << 20, 0.21))
        slow = replace(plain, network=replace(plain.network, sums_s=sums))
        assert Prices(faster_links(slow)).sum_s(1 << 20) == pytest.approx(0.11)

    def test_one_more_has_a_link_of_its_own_or_shares_the_air(self) -> None:
        for shared in (False, True):
            before = profile(3, shared=shared)
            after = one_more(before)
            assert len(after.devices) == 4
            assert before.network is not None and after.network is not None
            assert len(after.network.links) == 4
            grown = after.network.together_bytes_per_s / before.network.together_bytes_per_s
            assert grown == pytest.approx(1 if shared else 4 / 3)


class TestGuess:
    def test_the_figures_come_out_again(self) -> None:
        found = guessed([Figures("a", 7e9, 1 << 30, 1.2e7), Figures("b", 3e10, 4 << 30, 1.2e7)])
        assert is_guess(found)
        assert speed(found.devices[0]) == pytest.approx(7e9, rel=0.15)
        assert speed(found.devices[1]) == pytest.approx(3e10, rel=0.15)
        assert found.network is not None and not found.network.shared
        assert Profile.from_json(found.to_json()) == found

    def test_air_is_shared(self) -> None:
        found = guessed([Figures("a", 7e9, 1 << 30, 5e6)] * 2, air_bytes_per_s=2.5e6)
        assert found.network is not None and found.network.shared
        assert Prices(found).medium == 2.5e6

    def test_one_device_has_no_network(self) -> None:
        assert guessed([Figures("a", 7e9, 1 << 30, 5e6)]).network is None

"""Profiles: what is written is what is read back, and one is used only while it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.measure.key import difference, power_state
from terrazzo.measure.kin import Share
from terrazzo.measure.store import ProfileStore
from terrazzo.records.machine import Machine
from terrazzo.records.profile import (
    DeviceProfile,
    LinkProfile,
    Load,
    Network,
    Own,
    Profile,
    Timing,
)

steady = settings(derandomize=True, deadline=None)
MACHINE = Machine("Linux 6 x86_64", "a board", 4, 1 << 30, "3.11.2", "2.13.0", "0.1.0")
KEY = {"model": "0123", "devices": "2xpi3", "torch": "2.13.0", "power state": "unknown"}

sizes = st.integers(1, 10**9)
seconds, shares, rates = st.floats(1e-9, 1e4), st.floats(0, 1), st.floats(1e2, 1e13)
loads = st.builds(Load, st.text(max_size=20), sizes, sizes, sizes, sizes, sizes, sizes)
timings = st.builds(Timing, loads, seconds, st.none() | seconds, st.none() | seconds)
steps = st.dictionaries(st.text(max_size=8), st.tuples(shares, shares), max_size=3)
owns = st.builds(Own, steps, shares, shares)
devices = st.builds(
    DeviceProfile,
    name=st.text(max_size=8),
    machine=st.just(MACHINE),
    power=st.text(max_size=8),
    threads=st.integers(1, 64),
    memory_bytes=sizes,
    seconds_per_cpu_s=st.floats(1, 100),
    calls_s=st.tuples(seconds, seconds),
    copy_bytes_per_s=rates,
    fresh_s_per_byte=shares,
    update_s_per_element=st.dictionaries(st.sampled_from(["sgd", "adam"]), shares),
    own=owns,
    saved_s=shares,
    timings=st.lists(timings, max_size=3).map(tuple),
    took_s=seconds,
    left_out=st.integers(0, 9),
    accelerator=st.sampled_from(["", "A GPU, CUDA 12.8"]),
)
pairs = st.lists(st.tuples(sizes, seconds), max_size=3).map(tuple)
links = st.builds(LinkProfile, rates, rates, shares, shares, shares, shares)


def networks(count: int) -> st.SearchStrategy[Network]:
    return st.builds(
        Network,
        links=st.lists(links, min_size=count, max_size=count).map(tuple),
        shared=st.booleans(),
        alone_bytes_per_s=rates,
        together_bytes_per_s=rates,
        sums_s=pairs,
    )


def of(count: int) -> st.SearchStrategy[Profile]:
    return st.builds(
        Profile,
        key=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        devices=st.lists(devices, min_size=count, max_size=count).map(tuple),
        network=networks(count) if count > 1 else st.none(),
        measured_s=seconds,
    )


profiles = st.integers(1, 3).flatmap(of)


def made(**changes: str) -> Profile:
    device = DeviceProfile(
        "pi3-0", MACHINE, "ondemand", 1, 900 << 20, 10.0, (1e-6, 2e-6), 1e9, 1e-9, {"sgd": 1e-9},
        (Timing(Load("conv2d 3x3 s1", 100, 9, 8, 300, 800, 9), 1e-3, 2e-3, 3e-3),),
    )  # fmt: skip
    link = LinkProfile(1.1e7, 1.2e7, 4e-3, 1e-9, 2e-4, 1e-9)
    network = Network((link, link), False, 1.2e7, 2.3e7, ((1 << 20, 0.1),))
    return Profile({**KEY, **changes}, (device, replace(device, name="pi3-1")), network, 1.7e9)


class TestRecord:
    @steady
    @given(profiles)
    def test_what_is_written_is_read_back(self, profile: Profile) -> None:
        assert Profile.from_json(profile.to_json()) == profile

    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "old.json"
        path.write_text(json.dumps({**json.loads(made().to_json()), "version": 0}))
        with pytest.raises(UsageError, match=r"old\.json: .* version 0, .* reads version 3"):
            Profile.load(path)

    def test_a_missing_part_is_named(self) -> None:
        body = json.loads(made().to_json())
        del body["devices"][0]["timings"][0]["forward_s"]
        with pytest.raises(UsageError, match=r"profile record is damaged .*forward_s"):
            Profile.from_json(json.dumps(body))

    def test_a_gradient_takes_what_forward_takes(self) -> None:
        load = Load("linear", rows=3, inner=5, outer=7, reads=15, writes=21)
        assert (load.flops, load.weights, load.is_product) == (210, 35, True)


class TestStore:
    def test_a_kept_profile_is_found_again(self, tmp_path: Path) -> None:
        store = ProfileStore(tmp_path / "new" / "folder")
        assert "not measured" in store.find(KEY).reason
        store.keep(made())
        assert store.find(KEY).profile == made()

    def test_a_change_is_named_and_the_profile_not_used(self, tmp_path: Path) -> None:
        store = ProfileStore(tmp_path)
        store.keep(made())
        found = store.find({**KEY, "torch": "2.14.0"})
        assert found.profile is None
        assert found.reason == "torch was 2.13.0, is 2.14.0"

    @pytest.mark.parametrize("name", ["model", "devices"])
    def test_models_and_places_have_files_of_their_own(self, tmp_path: Path, name: str) -> None:
        store = ProfileStore(tmp_path)
        store.keep(made())
        store.keep(made(**{name: "another"}))
        assert store.find(KEY).profile == made()
        assert store.find({**KEY, name: "another"}).profile == made(**{name: "another"})

    def test_a_damaged_file_is_measured_again(self, tmp_path: Path) -> None:
        store = ProfileStore(tmp_path)
        store.keep(made()).write_text("{")
        found = store.find(KEY)
        assert found.profile is None
        assert "not JSON" in found.reason

    def test_it_lives_among_the_users_caches(self, tmp_path: Path) -> None:
        folder = ProfileStore.usual({"XDG_CACHE_HOME": str(tmp_path)}).folder
        assert folder == tmp_path / "terrazzo" / "profiles"
        assert ProfileStore.usual({}).folder.parts[-3:] == (".cache", "terrazzo", "profiles")

    def test_keys_that_say_more_differ(self) -> None:
        assert difference(KEY, KEY) == ""
        assert difference({**KEY, "threads": "4"}, KEY) == "threads was not noted, is 4"


class TestPowerState:
    def test_governor_and_clock_where_the_system_tells(self, tmp_path: Path) -> None:
        assert power_state(tmp_path) == "unknown"
        (tmp_path / "scaling_governor").write_text("powersave\n")
        (tmp_path / "scaling_max_freq").write_text("1400000\n")
        assert power_state(tmp_path) == "powersave, 1400000 kHz"


class TestCommand:
    def test_a_profile_is_shown(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        made().save(tmp_path / "profile.json")
        assert main(["cluster", "profile", "--show", str(tmp_path / "profile.json")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "conv2d 3x3 s1 1 0.0144 G/s 0.0072 G/s 0.0048 G/s" in shown
        assert "pi3-0 to pi3-1, 2 alike" in shown
        assert "up 88 Mbit/s, down 96 Mbit/s" in shown
        assert "a way of its own for each device" in shown

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ([], "name a MODEL"),
            (["net.py:build"], "name a MODEL"),
            (["no.such.module:net", "--input", "1x3x8x8"], "no module no"),
            (["--show", "missing.json"], "missing.json cannot be read"),
            (["m:n", "--input", "1x3x8x8", "--seconds", "0"], "at least 0.5"),
            (["m:n", "--input", "1x3x8x8", "--on", "6xnone"], "no preset none"),
        ],
    )
    def test_what_makes_no_sense_is_one_line(
        self, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["cluster", "profile", *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert complaint in said and "\n" not in said


def test_kin_share_all_but_the_shortest_trials() -> None:
    """Those everybody times come first; each begins the rest at another one."""
    orders = [Share(place, 3).order(10, [4, 1]) for place in range(3)]
    assert all(order[:2] == [4, 1] and sorted(order) == list(range(10)) for order in orders)
    assert len({order[2] for order in orders}) == 3

"""Descriptions and presets of emulated clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.errors import UsageError
from terrazzo.lab.preset import BUILT_IN, Preset, load_presets
from terrazzo.lab.topology import Topology, is_description


@pytest.fixture
def presets(tmp_path: Path) -> dict[str, Preset]:
    return load_presets(here=tmp_path)


class TestDescriptions:
    def test_six_of_one_kind(self, presets: dict[str, Preset]) -> None:
        found = Topology.parse("6xpi3", presets)
        assert found.names == ("pi3-0", "pi3-1", "pi3-2", "pi3-3", "pi3-4", "pi3-5")
        assert len({device.address for device in found.devices}) == 6
        assert {device.link.bits_per_s for device in found.devices} == {94e6}
        assert found.air_bits_per_s is None

    def test_kinds_mixed(self, presets: dict[str, Preset]) -> None:
        found = Topology.parse("2xpi5,3xpi3", presets)
        assert found.names == ("pi5-0", "pi5-1", "pi3-2", "pi3-3", "pi3-4")
        assert found.devices[0].flops_per_s > found.devices[2].flops_per_s

    def test_the_air_is_one_for_all_and_crossed_twice(self, presets: dict[str, Preset]) -> None:
        wifi = presets["pi4"].wifi
        assert wifi is not None
        assert Topology.parse("4xpi4:wifi", presets).air_bits_per_s == wifi.bits_per_s / 2

    def test_a_board_without_a_cable_is_on_the_air(self, presets: dict[str, Preset]) -> None:
        assert Topology.parse("2xzero2", presets).link_kind == "wifi"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("6xfoo", "no preset foo; there are laptop, pi3, pi4, pi5, zero2"),
            ("0xpi3", "at least 1"),
            ("6x", "'6x' is not understood"),
            ("6xpi3:fibre", "no link fibre"),
            ("2xpi3,", "'' is not understood"),
            ("2xpi3,2xpi4:wifi", "mixes wire and wifi"),
            ("1xzero2:wire", "zero2 has no wire"),
            ("201xpi3", "addresses for 200"),
        ],
    )
    def test_refused(self, presets: dict[str, Preset], text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Topology.parse(text, presets)

    @pytest.mark.parametrize("text", ["cluster.toml", "many", "", "4", "x3"])
    def test_what_is_no_description(self, text: str) -> None:
        assert not is_description(text)

    def test_survives_json(self, presets: dict[str, Preset]) -> None:
        found = Topology.parse("1xpi5,2xpi3", presets)
        assert Topology.from_json(found.to_json()) == found


TABLE = "gflops = 2.0\nthreads = 2\nmemory_mib = 256\nwire = { mbit = 10.0 }\n"


class TestPresets:
    def test_each_figure_has_a_source(self, presets: dict[str, Preset]) -> None:
        for preset in presets.values():
            given = {"compute", "memory", "watts", "storage"}
            given |= {kind for kind in ("wire", "wifi") if getattr(preset, kind)}
            given |= {"vectors"} if preset.vector_bits else set()
            assert set(preset.sources) == given, preset.name

    def test_own_ones_here_and_in_a_named_file(self, tmp_path: Path) -> None:
        (tmp_path / "terrazzo-presets.toml").write_text(f"[mine]\n{TABLE}")
        named = tmp_path / "other.toml"
        named.write_text(f"[pi3]\n{TABLE}")
        found = load_presets([named], here=tmp_path)
        assert found["mine"].memory_bytes == 256 << 20
        assert found["pi3"].flops_per_s == 2e9  # over the built-in one
        assert set(load_presets(here=tmp_path / "elsewhere")) == set(load_presets([BUILT_IN]))

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ("gflops = 1.0\nthreads = 1\nmemory_mib = 1\n", "neither wire nor wifi"),
            ("gflops = -1.0\nthreads = 1\nmemory_mib = 1\n", "gflops = -1.0; it must be"),
            ("gflops = 1.0\nthreads = 1\n", "memory_mib = None"),
            ("speed = 1.0\n", "says speed; known are"),
            ("gflops = nan\n", "gflops = nan"),
            (f"vector_bits = 96\n{TABLE}", "vector_bits = 96; known are 128, 256, 512"),
            ("wire = 3\ngflops = 1.0\nthreads = 1\nmemory_mib = 1\n", "it is a table of mbit"),
        ],
    )
    def test_refused(self, tmp_path: Path, table: str, says: str) -> None:
        path = tmp_path / "bad.toml"
        path.write_text(f"[mine]\n{table}")
        with pytest.raises(UsageError, match=says):
            load_presets([path], here=tmp_path)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "bad.toml").write_text("[[")
        for name in ("bad.toml", "missing.toml"):
            with pytest.raises(UsageError, match=f"{name} cannot be read"):
                load_presets([tmp_path / name], here=tmp_path)

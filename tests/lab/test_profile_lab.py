"""A profile of emulated devices, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import PRESETS

from terrazzo.records.profile import Profile

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_emulated_devices_are_measured_at_their_own_speed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "presets.toml").write_text(PRESETS)
    words = (
        "cluster profile net.py:build --input 1x3x64x64 --on 2xroomy --presets presets.toml "
        "--no-verify --seconds 3 --save profile.json"
    )
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo.cli", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.key["emulation"] != "none"
    for device in profile.devices:
        assert device.name in ("roomy-0", "roomy-1")
        assert device.memory_bytes == 700 << 20
        assert device.seconds_per_cpu_s > 3, "a quota of a tenth of a core was not felt"
        assert any(timing.load.is_product for timing in device.timings)
    assert profile.network is not None and not profile.network.shared
    for link in profile.network.links:
        assert link.up_bytes_per_s < 40e6 / 8 * 1.25, "faster than the emulated cable"

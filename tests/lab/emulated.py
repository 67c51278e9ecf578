"""Clusters for the tests: devices small enough that limits are soon reached."""

from __future__ import annotations

from pathlib import Path

from terrazzo.lab import Topology, load_presets

PRESETS = """
[small]
gflops = 4.0
threads = 1
memory_mib = 96
wire = { mbit = 40.0 }
wifi = { mbit = 40.0 }
storage = { read_mb = 20.0, write_mb = 10.0 }

[roomy]
gflops = 4.0
threads = 1
memory_mib = 700
wire = { mbit = 40.0 }
board = "pi-like"
"""


def described(text: str, folder: Path) -> Topology:
    path = folder / "presets.toml"
    path.write_text(PRESETS)
    return Topology.parse(text, load_presets([path]))

"""A simulated board and its knobs, for tests of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.boards import Rig, load_board
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(load_board("orin-like"), tmp_path / "board")


@pytest.fixture
def panel(rig: Rig) -> Panel:
    return Panel.find(Sysfs(rig.root, rig.pause))


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the user's own is read or written."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TERRAZZO_METER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""What a model trains and by which optimiser, as ``terrazzo plan`` is told and tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.cli.main import main

BUILD = """\
from torch import nn

def build():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3))
    model[0].requires_grad_(False)
    return model
"""


LIMIT = "22528KiB"
"""What a step of plain descent fits into, and one of Adam does not."""


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
        monkeypatch.chdir(tmp_path)
        Path("net.py").write_text(BUILD)

    def printed(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["plan", "net.py:build", "--input", "2x3x32x32", *arguments]) == 0
        return " ".join(capsys.readouterr().out.split())

    def test_what_is_frozen_is_taken_from_the_model(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = self.printed(capsys, "--on", "2xpi3", "--layout", "samples:2", "--groups", "one")
        assert "Frozen: 2 of 4 parameters." in out
        assert "part in sums over 577 KiB" in out, "256 (64 * 9 + 1) numbers"
        assert "keeps" not in out

    def test_the_state_is_shown_as_a_part(self, capsys: pytest.CaptureFixture[str]) -> None:
        plain = self.printed(capsys)
        assert "optimiser's state" not in plain
        adam = self.printed(capsys, "--optimizer", "adam")
        assert "the optimiser's state 1.1 MiB" in adam
        assert "Memory counts what adam keeps" in adam

    def test_limits_count_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["plan", "net.py:build", "--input", "2x3x32x32", "--memory", LIMIT]
        assert main(command) == 0
        assert main([*command, "--optimizer", "adam"]) == 2
        assert "the optimiser's state 1.1 MiB" in capsys.readouterr().err

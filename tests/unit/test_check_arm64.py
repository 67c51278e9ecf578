"""The check for Arm boards finds what is missing or too large, and says what it could not try."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import board
import check_arm64
import wheels
from wheels import Wheel


def wheel(name: str, *requires: str, size_bytes: int = 1_000_000) -> Wheel:
    return Wheel(name, "1.0", size_bytes, tuple(map(Requirement, requires)))


def reached(python: str, *found: Wheel) -> tuple[set[str], set[str]]:
    top = [Requirement("top>=1")]
    return wheels._reached(top, {w.name: w for w in found}, wheels._board(python))


class TestWheels:
    def test_markers_are_answered_for_the_board(self) -> None:
        """pip answers them for the machine it runs on: another Python, another processor."""
        top = wheel(
            "top",
            'old-only>=2; python_version < "3.11"',
            'pc-only; platform_machine == "x86_64"',
            'asked-for; extra == "more"',
            "always",
        )
        assert reached("3.10", top, wheel("always")) == ({"top", "always"}, {"old-only>=2"})
        assert reached("3.12", top, wheel("always"), wheel("pc-only")) == ({"top", "always"}, set())

    def test_what_is_needed_is_followed_to_the_end(self) -> None:
        chain = [wheel("top", "Middle_One<3"), wheel("middle-one", "last"), wheel("last", "top")]
        assert reached("3.11", *chain) == ({"top", "middle-one", "last"}, set())

    def test_no_wheel_and_no_answer_are_told_apart(self, tmp_path: Path) -> None:
        download = ["download", "--no-index", "--dest", str(tmp_path), *wheels.target("3.11")]
        with pytest.raises(wheels.NoWheel, match="surely-absent"):
            wheels.pip([*download, "surely-absent"])
        with pytest.raises(wheels.NoAnswer):
            wheels.pip([*download, "--requirement", str(tmp_path / "no-such-file.txt")])

    def test_the_limit(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = [wheel("one", size_bytes=20_000_000), wheel("two", size_bytes=9_000_000)]
        assert check_arm64._show("3.11", found, 30.0)
        assert "29.00 MB\n" in capsys.readouterr().out
        assert not check_arm64._show("3.11", found, 28.0)
        assert "29.00 MB  OVER the limit of 28 MB" in capsys.readouterr().out

    def test_torch_alone_is_left_out(self) -> None:
        names = {requirement.name for requirement in check_arm64.needed()}
        assert "torch" not in names
        assert {"numpy", "safetensors"} <= names


class TestBoard:
    @pytest.mark.skipif(board.is_arm64(), reason="an Arm machine needs no emulated board")
    def test_says_loudly_when_it_cannot_emulate(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", "")
        assert not check_arm64._check_board(torch=None)
        text = capsys.readouterr().out
        assert "NOT RUN, so nothing is known" in text
        assert "there is no apt-get" in text

    def test_tests_for_the_board_are_told_from_the_others(self, tmp_path: Path) -> None:
        """The probe runs where torch can't be imported, so nothing slips through."""
        codes = {"pure": "import math", "heavy": "import torch.nn", "busy": "import subprocess"}
        files = [tmp_path / f"test_{name}.py" for name in codes]
        for file, code in zip(files, codes.values(), strict=True):
            file.write_text(code)
        command = [sys.executable, "-c", check_arm64.PROBE, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told = [line.split("\t")[1] for line in done.stdout.splitlines()]
        assert told == ["", "needs torch", "starts processes"]

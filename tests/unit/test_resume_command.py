"""``terrazzo run --resume``: what is left open is taken from the run it goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.cli.resume import completed, environment
from terrazzo.cluster import LocalHosts
from terrazzo.errors import UsageError
from terrazzo.records.run import Run, RunFolder


def recorded(path: Path, on: str) -> str:
    folder = RunFolder.take(path)
    folder.write(Run.begin("train", ["python", "train.py", "--epochs", "5"], 3, on=on))
    return str(path)


def test_script_arguments_and_place(tmp_path: Path) -> None:
    lab, old = recorded(tmp_path / "lab", "6xpi3"), recorded(tmp_path / "old", "")
    script = ["train.py", "--epochs", "5"]
    assert completed(["run", "--resume", lab]) == ["run", "--on", "6xpi3", "--resume", lab, *script]
    assert completed(["run", f"--resume={old}"]) == ["run", "--on", "3", f"--resume={old}", *script]
    both = ["run", "--resume", lab, "--on", "2", "--no-recovery"]
    assert completed(both) == [*both, *script]


def test_what_is_said_stays(tmp_path: Path) -> None:
    for words in (
        ["run", "--on", "2", "train.py", "--resume", "nowhere"],  # the script's own
        ["run", "--resume", "nowhere", "--on", "2", "other.py"],
        ["report", "--resume", "x"],
        ["run", "--on", "2", "train.py"],
        [],
    ):
        assert completed(words) == words
    with pytest.raises(UsageError, match="holds no run"):
        completed(["run", "--resume", str(tmp_path)])


def test_no_checkpoint_is_told_before_devices_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no checkpoint: .* every=100"):
        environment(tmp_path, LocalHosts(1))
    (tmp_path / "checkpoints" / "0" / "step-00000004").mkdir(parents=True)
    found = environment(tmp_path, LocalHosts(1))
    assert found == {"TERRAZZO_RESUME": str((tmp_path / "checkpoints").resolve())}

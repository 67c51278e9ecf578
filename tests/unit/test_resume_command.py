"""``terrazzo run --resume``: what is left open is taken from the run it goes on with."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from terrazzo.cli.main import main
from terrazzo.cli.resume import completed, environments
from terrazzo.cluster import LocalHosts
from terrazzo.cluster.agent.shelf import newest
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
        environments(tmp_path, LocalHosts(2))
    (tmp_path / "cluster.json").touch()
    with pytest.raises(UsageError, match=r"holds no checkpoint: it ran on real devices"):
        environments(tmp_path, LocalHosts(2))
    (tmp_path / "checkpoints" / "0" / "step-00000004").mkdir(parents=True)
    found = environments(tmp_path, LocalHosts(2))
    assert found == [{"TERRAZZO_RESUME": str((tmp_path / "checkpoints").resolve())}] * 2


def test_a_run_that_goes_on_without_records_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; sys.exit('TERRAZZO_RESUME' in os.environ)")
    (tmp_path / "one" / "checkpoints" / "0" / "step-00000004").mkdir(parents=True)
    words = ["run", "--on", "1", "--no-record", "--resume", str(tmp_path / "one"), str(script)]
    assert main(words) == 1


def test_two_runs_of_one_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    names = ["--resume", str(tmp_path / "one"), "--run-dir", str(tmp_path / "other" / "one")]
    assert main(["run", "--on", "1", *names, str(tmp_path / "train.py")]) == 2
    assert "have one name" in capfd.readouterr().err


def saved(folder: Path, body: bytes = b"weights", *, told: bytes = b"weights") -> None:
    """A checkpoint as far as its files and their hashes go."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(body)
    hashes = {"model.safetensors": sha256(told).hexdigest()}
    (folder / "state.json").write_text(json.dumps({"hashes": hashes}))


def test_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    assert newest({"run": str(tmp_path)}) == {"step": -1, "path": "", "damaged": []}
    kept = tmp_path / "checkpoints"
    saved(kept / "0" / "step-00000004")
    saved(kept / "1" / "step-00000003")
    assert newest({"run": str(tmp_path)})["path"] == str(kept / "0" / "step-00000004")
    replaced = tmp_path / "device-1" / "checkpoints" / "0" / ".replaced-step-00000005"
    saved(replaced)
    (kept / "0" / ".unfinished-step-00000009").mkdir()
    assert newest({"run": str(tmp_path)})["path"] == str(replaced)
    damaged = [kept / "1" / f"step-0000000{step}" for step in (9, 8, 7)]
    saved(damaged[0], b"other")
    damaged[1].mkdir()
    saved(damaged[2])
    (damaged[2] / "state.json").write_text('{"hashes": 3}')
    found = newest({"run": str(tmp_path)})
    assert found == {"step": 5, "path": str(replaced), "damaged": list(map(str, damaged))}

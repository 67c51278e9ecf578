"""Run folders: made, named, and left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.records.run import Run, RunFolder


def terrazzo(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "terrazzo.cli", *words]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, timeout=200, check=False, **options
    )


class TestRunFolder:
    def test_never_overwrites(self, tmp_path: Path) -> None:
        names = {RunFolder.create(tmp_path, "My Net.v2").path.name for _ in range(3)}
        assert len(names) == 3
        assert all("-my-net-v2" in name for name in names)

    def test_a_named_folder_must_be_empty(self, tmp_path: Path) -> None:
        RunFolder(tmp_path).write(Run.begin("train", ["python", "train.py"], 3))
        with pytest.raises(UsageError, match="is not empty"):
            RunFolder.take(tmp_path)

    @pytest.mark.parametrize("way", ["--run-dir", "runs"])
    def test_no_folder_can_be_made(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").write_text("a file where the folder should be")
        (tmp_path / "train.py").write_text("raise SystemExit('started')")
        extra = ["--run-dir", "runs/x"] if way == "--run-dir" else []
        assert main(["run", "--on", "2", *extra, "train.py"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "nothing can be recorded in runs" in err and "--no-record" in err

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """Files that may not grow stand in for a disk without room: the write itself fails."""
        (tmp_path / "train.py").write_text("raise SystemExit('started')")

        words = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "2", "train.py"]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "nothing can be recorded in runs/" in done.stderr

    def test_recording_can_be_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import os; print('TERRAZZO_RUN' in os.environ)")
        done = terrazzo("run", "--on", "1", "--no-record", "train.py", cwd=tmp_path)
        assert done.stdout == "device0 | False\n"
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]

    def test_a_script_without_terrazzo_leaves_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('hello')")
        done = terrazzo("run", "--on", "1", "train.py", cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("device0 | hello\n", "")
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]

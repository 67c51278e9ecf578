"""Which files go along with a script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from terrazzo.cluster.code import Code
from terrazzo.errors import UsageError


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")


def code(folder: Path, script: str = "train.py", here: str = ".", limit: int = 1 << 20) -> Code:
    return Code.of_script(folder / script, here=folder / here, limit_bytes=limit)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_a_plain_folder_without_what_never_goes(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "lib/net.py", "data.csv", ".env", "__pycache__/a.pyc", "runs/x/y")
    write(tmp_path, "own/pyvenv.cfg", "own/lib/site.py", "venv/a.py", "notes/big.bin", "notes/a.md")
    (tmp_path / ".terrazzoignore").write_text("# not needed there\n*.csv\nnotes/big.bin\n")
    assert sorted(code(tmp_path).files) == ["lib/net.py", "notes/a.md", "train.py"]


def test_in_a_repository_what_git_tracks(tmp_path: Path) -> None:
    write(tmp_path, "jobs/train.py", "jobs/used.py", "net.py", "secret.txt", "gone.py")
    git(tmp_path, "init")
    git(tmp_path, "add", "net.py", "jobs/train.py", "gone.py")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "net.py").write_text("# changed since")
    found = code(tmp_path, "jobs/train.py", here="jobs")
    assert sorted(found.files) == ["jobs/train.py", "net.py"]
    assert found.left_out == ("jobs/used.py",)
    assert found.root == tmp_path
    assert found.directory == "jobs"
    assert found.files["net.py"][1] == len("# changed since")


def test_a_script_that_git_does_not_track_goes_too(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "net.py")
    git(tmp_path, "init")
    git(tmp_path, "add", "net.py")
    assert sorted(code(tmp_path).files) == ["net.py", "train.py"]


def test_links_stay_inside(tmp_path: Path) -> None:
    write(tmp_path, "project/train.py", "project/real.py", "outside.py")
    (tmp_path / "project" / "link.py").symlink_to("real.py")
    (tmp_path / "project" / "away.py").symlink_to("../outside.py")
    (tmp_path / "project" / "nowhere.py").symlink_to("none.py")
    assert sorted(code(tmp_path / "project").files) == ["link.py", "real.py", "train.py"]


def test_too_much_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / "weights.bin").write_bytes(bytes(2000))
    with pytest.raises(UsageError, match=r"weights\.bin has 2\.0 KiB, at most 1\.0 KiB"):
        code(tmp_path, limit=1000)
    (tmp_path / "weights.bin").write_bytes(bytes(600))
    (tmp_path / "more.bin").write_bytes(bytes(500))
    with pytest.raises(UsageError, match=r"\(largest: weights\.bin\) has 1\.1 KiB, at most 1\.0"):
        code(tmp_path, limit=1000)


def test_terrazzo_itself(tmp_path: Path) -> None:
    found = Code.of_terrazzo()
    assert {"terrazzo/__init__.py", "terrazzo/lab/presets.toml"} <= set(found.files)
    assert not [name for name in found.files if "__pycache__" in name]
    assert found.digest == Code.of_terrazzo().digest


def test_modes_are_plain(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "tool.sh")
    (tmp_path / "tool.sh").chmod(0o4777)
    files = code(tmp_path).files
    assert (files["train.py"][2], files["tool.sh"][2]) == (0o644, 0o755)

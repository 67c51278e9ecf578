"""Cells: processes with limits of their own, against folders that mimic the kernel's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from terrazzo.errors import LabError
from terrazzo.lab import cell as cells
from terrazzo.lab.cell import cell, inside, slow_storage
from terrazzo.lab.groups import Group
from terrazzo.lab.groups1 import Group1
from terrazzo.lab.groups2 import Groups2

sys.path.insert(0, str(Path(__file__).parent))
from kerneltree import ALL, empty, make, tree

SPEED = {"read_bytes_per_s": 20, "reads_per_s": 6}
THROTTLES = ("read_bps", "write_bps", "read_iops")


@contextmanager
def opened(root: Path) -> Iterator[Group]:
    with cell(tree(root), folder=root) as group:
        try:
            yield group
        finally:
            empty(root)


def test_it_is_there_while_the_block_runs(tmp_path: Path) -> None:
    with opened(tmp_path) as group:
        (procs,) = group.joining
        assert procs.parent.name == "cell"
        assert procs.parent.is_dir()
    assert not list(tmp_path.glob("terrazzo-*"))


def test_work_is_done_inside_by_another_process(tmp_path: Path) -> None:
    with opened(tmp_path) as group:
        found = inside(group, os.getpid)
        assert found != os.getpid()
        assert group.joining[0].read_text() == str(found), "it went in before it worked"


def test_work_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no such picture")

    failing = pytest.raises(LabError, match="ended before its work was done")
    with opened(tmp_path) as group, failing:
        inside(group, fail)
    assert "no such picture" in capfd.readouterr().err


def test_storage_is_slowed_by_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "disk_of", lambda path: "8:0")
    with slow_storage(tmp_path, **SPEED, groups=tree(tmp_path)) as group:
        written = group.joining[0].with_name("io.max").read_text()
        empty(tmp_path)
    assert written == "8:0 rbps=20 wbps=max riops=6 wiops=max"


@pytest.mark.parametrize(
    ("disk", "offered", "words"),
    [
        (None, ALL, "is on no disk of this machine's own"),
        ("8:0", frozenset({"cpu", "memory"}), "offers no blkio or io controller"),
    ],
)
def test_storage_that_cannot_be_slowed(
    disk: str | None,
    offered: frozenset[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cells, "disk_of", lambda path: disk)
    slowed = slow_storage(tmp_path, **SPEED, groups=Groups2(tmp_path, offered, make))
    with pytest.raises(LabError, match=words), slowed:
        pass
    assert not list(tmp_path.iterdir())


def test_version_1_has_a_file_for_each_limit(tmp_path: Path) -> None:
    files = [tmp_path / f"blkio.throttle.{name}_device" for name in THROTTLES]
    for path in files:
        path.touch()
    Group1({"blkio": tmp_path}).limit_storage("8:0", **SPEED)
    assert [path.read_text() for path in files] == ["8:0 20", "", "8:0 6"]

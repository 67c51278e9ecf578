"""Devices that are written into a cluster's file while its run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.cluster import arrivals
from terrazzo.cluster.arrivals import Arrivals
from terrazzo.errors import UsageError


def write(path: Path, *names: str) -> None:
    """As an editor does: another file takes its place."""
    beside = path.with_suffix(".new")
    beside.write_text("".join(f'[[device]]\nhost = "{name}"\n\n' for name in names) or "half a")
    beside.replace(path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arrivals, "LOOK_S", 0.0)
    write(tmp_path / "cluster.toml", "one", "two")
    return tmp_path / "cluster.toml"


def test_new_ones_come_one_after_the_other(path: Path) -> None:
    found = Arrivals(path)
    assert found.next() is None
    write(path, "three", "one", "four")
    coming = [found.next(), found.next()]
    assert [one and one.name for one in coming] == ["three", "three"], "until it is here"
    found.came()
    write(path, "one")
    last = found.next()
    assert last is not None
    assert last.name == "four", "once written, it is waited for"
    found.came()
    assert found.next() is None


def test_a_file_that_cannot_be_read_is_told_once(path: Path) -> None:
    found = Arrivals(path)
    write(path)
    with pytest.raises(UsageError):
        found.next()
    assert found.next() is None
    path.unlink()
    with pytest.raises(UsageError):
        found.next()
    write(path, "one", "two", "three")
    coming = found.next()
    assert coming is not None
    assert coming.name == "three"

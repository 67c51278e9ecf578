"""Records that devices send: below the run's folder, never over each other, never over ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.cluster import records
from terrazzo.cluster.records import Collected


def sent(folder: Path, device: int, *pieces: bytes) -> set[str]:
    """What a device could not get rid of."""
    one = Collected(folder, device)
    for piece in pieces:
        one.add(piece)
    one.close()
    return one.dropped


def test_pieces_follow_each_other(tmp_path: Path) -> None:
    assert (
        sent(tmp_path, 0, b"events-0.jsonl\0one\n", b"a/b.bin\0\0\1", b"events-0.jsonl\0two")
        == set()
    )
    assert (tmp_path / "events-0.jsonl").read_text() == "one\ntwo"
    assert (tmp_path / "a" / "b.bin").read_bytes() == b"\0\1"


@pytest.mark.parametrize(
    "name", ["../out", "/etc/out", "a/../../out", ".ssh/x", "", "a\nb", "a//b"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    assert sent(folder, 0, name.encode() + b"\0data") == {name}
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "vitals-0.jsonl"]


def test_what_is_here_stays(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("ours")
    assert sent(tmp_path, 0, b"plan.json\0of 0", b"run.json\0theirs") == set()
    assert sent(tmp_path, 1, b"plan.json\0of 1") == set()
    assert (tmp_path / "run.json").read_text() == "ours"
    assert (tmp_path / "plan.json").read_text() == "of 0"
    assert (tmp_path / "device-1" / "plan.json").read_text() == "of 1"


def test_what_is_too_much_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 10)
    assert sent(tmp_path, 0, b"a\0" + bytes(8), b"b\0" + bytes(8)) == {"b"}

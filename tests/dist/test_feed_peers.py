"""Four devices hold a quarter of the data each; only one of them has the files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import run_on
from expendable import die, fates
from plain import cnn

import terrazzo as tz
from terrazzo.feed import peers, sharing
from terrazzo.feed.arbiter import Memory
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from pictures import Files

COUNT, EPOCHS, BATCH = 40, 4, 4
TESTED = 8


class Pictures(Files):
    """Decoded to what a net takes."""

    def __getitem__(self, index: int) -> Any:
        data, label = super().__getitem__(index)
        return data[:48].reshape(3, 4, 4).double() / 255, label % 5


def fed(folder: str, lost: int = -1, *, everybody: bool = False, tests: bool = False) -> Any:
    """Trains; ``tests``: another data set of the same net is looked at before and in between."""
    if lost >= 0:
        tz.init(recover=True)
    net = tz.parallelize(cnn(), (torch.zeros(BATCH, 3, 4, 4, dtype=torch.float64),))
    links = net.links
    me = links.device
    reads = everybody or me == 0
    data = Pictures(Path(folder) / f"data{me}", COUNT, size=20_000) if reads else None
    other = Pictures(Path(folder) / f"test{me}", TESTED, size=100) if reads else None
    links.recorder = Recorder(Path(folder) / f"run{me}", 0)
    # Files in the page cache are faster than any other device, and memory is what it happens to be.
    peers.Peers._is_worth_it = lambda self, peer: True  # type: ignore[method-assign]
    Memory.here = classmethod(lambda cls: cls(1 << 34, 1 << 34, 0, 0))  # type: ignore[assignment]
    peers.CALL_S = peers.ANSWER_S = sharing.PATIENCE_S = 60.0  # and this machine may be busy
    for _ in tz.feed(other, net, batch_size=BATCH) if tests else ():
        pass
    seen = []
    for epoch in range(EPOCHS):
        labels: list[int] = []
        batches = tz.feed(data, net, batch_size=BATCH, workers=1, cache="300KiB")
        for number, (x, y) in enumerate(batches):
            if (me, epoch, number) == (lost, 1, 3):
                die()
            torch.autograd.backward(net(x).square().mean())
            labels += y.tolist()
        for _ in tz.feed(other, net, batch_size=BATCH, cache="300KiB") if tests else ():
            pass
        seen.append(labels)
    links.recorder.flush()
    events = read_events(Path(folder) / f"run{me}")
    rows = [dict(event.values) for event in events if event.name == "epoch"]
    rows = [row for row in rows if row["samples"] != TESTED]
    return {"seen": seen, "rows": rows, "members": list(links.members)}


def fed_often(folder: str) -> Any:
    """Another net in the same processes held nothing: that says nothing about this one."""
    first = tz.parallelize(cnn(), (torch.zeros(BATCH, 3, 4, 4, dtype=torch.float64),))
    reads = first.links.device == 0
    data = Pictures(Path(folder) / "other", BATCH, size=100) if reads else None
    for _ in tz.feed(data, first, batch_size=BATCH):
        pass
    return fed(folder, tests=True)


def test_storage_is_read_once(tmp_path: Path) -> None:
    found = run_on(4, fed_often, str(tmp_path))
    assert all(one["seen"] == found[0]["seen"] for one in found)
    rows = found[0]["rows"]
    files = (tmp_path / "data0").iterdir()
    total = sum(path.stat().st_size for path in files)
    assert [row["samples"] for row in rows] == [COUNT] * EPOCHS
    assert rows[0]["read_bytes"] == total
    assert [row["read_bytes"] for row in rows[1:]] == [0] * (EPOCHS - 1)
    assert all(row["held"] + row["peer"] == COUNT for row in rows[1:])
    assert all(row["peer"] > COUNT / 2 for row in rows[1:]), "three quarters are elsewhere"


def without_a_holder(folder: str) -> Any:
    return fed(folder, 2)


def without_the_reader(folder: str) -> Any:
    return fed(folder, 0, everybody=True)


@pytest.mark.timeout(120)
def test_what_a_lost_device_held_is_read_again(tmp_path: Path) -> None:
    done = [fate for fate in fates(3, without_a_holder, str(tmp_path)) if fate.kind == "done"]
    assert [fate.what["members"] for fate in done] == [[0, 1], [0, 1]]
    assert done[0].what["seen"] == done[1].what["seen"]
    rows = done[0].what["rows"]
    assert [row["samples"] for row in rows] == [COUNT] * EPOCHS
    assert all(row["read_bytes"] < rows[0]["read_bytes"] for row in rows[1:])
    assert rows[3]["peer"] > 0, "another device still holds its part"
    assert rows[3]["read_bytes"] > 0, "there is less memory now than there is data"


@pytest.mark.timeout(120)
def test_who_takes_over_reading_has_the_memory_of_the_others(tmp_path: Path) -> None:
    done = [fate for fate in fates(3, without_the_reader, str(tmp_path)) if fate.kind == "done"]
    assert [fate.what["members"] for fate in done] == [[1, 2], [1, 2]]
    assert done[0].what["seen"] == done[1].what["seen"]
    rows = done[0].what["rows"]
    assert [row["samples"] for row in rows[1:]] == [COUNT] * 2
    assert rows[0]["samples"] < COUNT, "the epoch in which the reader was lost"
    assert rows[2]["held"] > COUNT / 4
    assert rows[2]["peer"] > COUNT / 4

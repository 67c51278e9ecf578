"""Four devices hold a quarter of the data each; only one of them has the files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import run_on
from expendable import fates
from plain import cnn
from test_recovery import die, strike

import terrazzo as tz
from terrazzo.feed import peers, sharing
from terrazzo.feed.arbiter import Memory
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from pictures import Files

COUNT, EPOCHS, BATCH = 40, 4, 4


class Pictures(Files):
    """Decoded to what a net takes."""

    def __getitem__(self, index: int) -> Any:
        data, label = super().__getitem__(index)
        return data[:48].reshape(3, 4, 4).double() / 255, label % 5


def fed(folder: str, lost: int = -1) -> dict[str, Any]:
    if lost >= 0:
        tz.init(recover=True)
    net = tz.parallelize(cnn(), (torch.zeros(BATCH, 3, 4, 4, dtype=torch.float64),))
    links = net.links
    reads = links.device == 0
    data = Pictures(Path(folder) / "data", COUNT, size=20_000) if reads else None
    if reads:
        links.recorder = Recorder(Path(folder) / "run", 0)
    if links.device == lost:
        strike(links, "gather", die, at=330)
    # Files in the page cache are faster than any other device, and memory is what it happens to be.
    peers.Peers._is_worth_it = lambda self, peer: True  # type: ignore[method-assign]
    Memory.here = classmethod(lambda cls: cls(1 << 34, 1 << 34, 0, 0))  # type: ignore[assignment]
    peers.CALL_S = peers.ANSWER_S = sharing.PATIENCE_S = 60.0  # and this machine may be busy
    seen = []
    for _ in range(EPOCHS):
        labels: list[int] = []
        for x, y in tz.feed(data, net, batch_size=BATCH, workers=1, cache="300KiB"):
            torch.autograd.backward(net(x).square().mean())
            labels += y.tolist()
        seen.append(labels)
    rows: list[dict[str, float]] = []
    if reads and links.recorder is not None:
        links.recorder.flush()
        events = read_events(Path(folder) / "run")
        rows = [dict(event.values) for event in events if event.name == "epoch"]
    return {"seen": seen, "rows": rows, "members": list(links.members)}


def fed_twice(folder: str) -> dict[str, Any]:
    """Another net in the same processes held nothing: that says nothing about this one."""
    first = tz.parallelize(cnn(), (torch.zeros(BATCH, 3, 4, 4, dtype=torch.float64),))
    reads = first.links.device == 0
    data = Pictures(Path(folder) / "other", BATCH, size=100) if reads else None
    for _ in tz.feed(data, first, batch_size=BATCH):
        pass
    return fed(folder)


def test_storage_is_read_once(tmp_path: Path) -> None:
    found = run_on(4, fed_twice, str(tmp_path))
    assert all(one["seen"] == found[0]["seen"] for one in found)
    rows = found[0]["rows"]
    files = (tmp_path / "data").iterdir()
    total = sum(path.stat().st_size for path in files)
    assert [row["samples"] for row in rows] == [COUNT] * EPOCHS
    assert rows[0]["read_bytes"] == total
    assert [row["read_bytes"] for row in rows[1:]] == [0] * (EPOCHS - 1)
    assert all(row["held"] + row["peer"] == COUNT for row in rows[1:])
    assert all(row["peer"] > COUNT / 2 for row in rows[1:]), "three quarters are elsewhere"


@pytest.mark.timeout(120)
def test_what_a_lost_device_held_is_read_again(tmp_path: Path) -> None:
    done = [fate for fate in fates(3, fed, str(tmp_path), 2) if fate.kind == "done"]
    assert [fate.what["members"] for fate in done] == [[0, 1], [0, 1]]
    assert done[0].what["seen"] == done[1].what["seen"]
    rows = done[0].what["rows"]
    assert [row["samples"] for row in rows] == [COUNT] * EPOCHS
    assert all(row["read_bytes"] < rows[0]["read_bytes"] for row in rows[1:])
    assert rows[3]["peer"] > 0, "another device still holds its part"
    assert rows[3]["read_bytes"] > 0, "there is less memory now than there is data"

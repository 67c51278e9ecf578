"""Data in parts, and data that each device reads for itself: the batches that one would read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from expendable import die, fates, strike
from plain import cnn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import terrazzo as tz
from terrazzo.errors import DataError, RunError, TerrazzoError, UsageError
from terrazzo.feed import choice
from terrazzo.feed.feed import Feed
from terrazzo.feed.sources import source_of

COUNT, BATCH, EPOCHS = 11, 4, 2
ALL = range(COUNT)
PARTS: dict[str, Callable[[int], Any]] = {
    "thirds": lambda me: range(me, COUNT, 3),
    "overlapping": lambda me: [i for i in ALL if i % 3 != me],
    "two": lambda me: [range(6), range(6, COUNT), None][me],
    "each": lambda me: None,
}


ASKED: dict[int, list[int]] = {}
"""Of each data set: one that changed itself as it is read would stay in the training process."""


class Pictures(Dataset[Any]):
    """Turned at random, with a name; it knows what was asked of it, and may lack samples."""

    def __init__(self, mine: Any = None, *, count: int = COUNT, each_s: float = 0.0) -> None:
        self.count, self.mine, self.each_s = count, mine, each_s
        ASKED[id(self)] = []

    @property
    def asked(self) -> list[int]:
        return ASKED[id(self)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.mine is not None and index not in self.mine:
            raise FileNotFoundError(f"picture {index} lies elsewhere")
        self.asked.append(index)
        time.sleep(self.each_s)
        draw = torch.Generator().manual_seed(index)
        picture = torch.randint(256, (3, 23, 17), generator=draw, dtype=torch.uint8)
        if torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        return picture, {"label": index % 5, "name": f"picture {index}"}


class Plainer(Pictures):
    """All batches look the same, but for the last."""

    def __getitem__(self, index: int) -> Any:
        picture, about = super().__getitem__(index)
        return picture, about["label"]


SIX = {"batch_size": BATCH, "workers": 0}


def net_for(layout: str = "auto", batch: int = BATCH) -> tz.Net:
    example = (torch.zeros(batch, 3, 23, 17, dtype=torch.float64),)
    return tz.parallelize(cnn(), example, layout=layout, seed=5)


def whole_batches(workers: int = 0) -> list[tuple[Tensor, Tensor, list[str]]]:
    net, data = net_for(), Pictures()
    return [
        (x, y["label"], y["name"])
        for _ in range(EPOCHS)
        for x, y in tz.feed(data, net, batch_size=BATCH, workers=workers)
    ]


def plainer_batches() -> list[tuple[Tensor, Tensor]]:
    net, data = net_for(), Plainer(count=4 * BATCH + 3)
    return [batch for _ in range(EPOCHS) for batch in tz.feed(data, net, **SIX)]


def spread(layout: str, part: str, workers: int) -> tuple[list[Any], list[int]]:
    net = net_for(layout)
    mine = PARTS[part](net.links.device)
    data = Pictures(mine)
    options: dict[str, Any] = {"batch_size": BATCH, "workers": workers}
    if part == "each":
        options["reading"] = "each"
    elif mine is None:
        data, options = None, {}  # type: ignore[assignment]
    else:
        options["mine"] = mine
    found = [
        (x.box.slices(), x.tensor, y["label"], y["name"])
        for _ in range(EPOCHS)
        for x, y in tz.feed(data, net, **options)
    ]
    return found, [] if data is None else data.asked


@pytest.mark.parametrize(
    ("layout", "part", "workers"),
    [
        ("tiles:2,1,1x1", "thirds", 0), ("tiles:2,1,1x1", "each", 0), ("samples", "each", 1),
        ("samples", "overlapping", 1), ("samples", "two", 0),
    ],
)  # fmt: skip
def test_what_many_read_is_what_one_reads(layout: str, part: str, workers: int) -> None:
    (right,) = run_on(1, whole_batches)
    found = run_on(3, spread, layout, part, workers)
    for batches, _ in found:
        assert len(batches) == len(right)
        for (box, x, label, name), (whole, labels, names) in zip(batches, right, strict=True):
            assert torch.equal(x, whole[box])
            assert torch.equal(label, labels)
            assert name == names
    if workers:
        return  # who have read it in processes of their own
    asked = [len(seen) for _, seen in found]
    once = EPOCHS * COUNT
    if part == "each":  # the last batch is cut otherwise: one reads each sample of it
        assert sum(asked) == EPOCHS * (3 * 8 + 3) + 3, "each needs a part of all samples"
    else:
        assert once <= sum(asked) <= once + 3, "one device reads a sample; each looked at one first"


# ---- by measurement -----------------------------------------------------------------------------


def slow_pictures(each_s: float) -> tuple[list[int], list[int], dict[str, Any]]:
    """Five batches an epoch, of which the last two are measured."""
    choice.LEAST = 2
    choice.WORTH = 1.0  # nothing is sent ahead
    net = net_for("samples")
    told: dict[str, Any] = {}
    data = Pictures(count=5 * BATCH, each_s=each_s)
    labels, counts = [], []
    for epoch in range(4):
        if epoch == 3:
            told = source_of(data, net, **SIX).choice.told()  # type: ignore[union-attr]
        before = len(data.asked)
        for _, y in tz.feed(data, net, **SIX):
            labels += y["label"].tolist()
        counts.append(len(data.asked) - before)
    return labels, counts, told


def test_what_is_faster_is_found_out() -> None:
    """Both ways are measured; the machine may be busy, so either may be what is faster."""
    found = run_on(2, slow_pictures, 0.03)
    (labels, reader, told), (same, other, told_too) = found
    assert labels == same
    assert reader[0] >= 5 * BATCH
    assert other[0] <= 1, "one reads for all at first, the other looks at a sample"
    if choice.chosen([told, told_too]) == choice.EACH:
        assert reader[3] == other[3] == 5 * BATCH // 2
    else:
        assert (reader[3], other[3]) == (5 * BATCH, 0)


# ---- sent ahead ---------------------------------------------------------------------------------


def ahead(leave_at: int, parts: str) -> tuple[list[tuple[Any, ...]], int]:
    """Two ways through the data, the first of which may be left early; batches sent ahead."""
    measured = choice.Choice.is_ahead
    choice.Choice.is_ahead = True  # type: ignore[assignment,method-assign]
    try:
        return _ahead(leave_at, parts)
    finally:
        choice.Choice.is_ahead = measured  # type: ignore[method-assign]


def _ahead(leave_at: int, parts: str) -> tuple[list[tuple[Any, ...]], int]:
    net = net_for("tiles:2,1x1")
    options: dict[str, Any] = dict(SIX)
    count, me = 4 * BATCH + 3, net.links.device
    data = Plainer(count=count) if parts == "halves" or me == 0 else None
    if parts != "one":
        options["mine"] = range(me, count, 2) if parts == "halves" else range(count)
    found, posted = [], 0
    for way in range(2):
        feed = Feed(source_of(data, net, **options) if data else None, net, inputs=1, reader=0)
        for number, (x, y) in enumerate(feed):
            posted += feed._posted is not None or feed.many.posted is not None
            net(x.double() / 255)  # its messages travel beside those of the batch
            found.append((x.box.slices(), x.tensor, y))
            if way == 0 and number == leave_at:
                break
    net(torch.zeros(BATCH, 3, 23, 17, dtype=torch.float64))  # nothing was left behind
    return found, posted


@pytest.mark.parametrize("parts", ["one", "halves", "all of it on one"])
def test_batches_sent_ahead_are_the_same(parts: str) -> None:
    (right,) = run_on(1, plainer_batches)
    left_early, whole = (2, right[:3] + right[5:]), (9, right)
    for leave_at, ways in (left_early, whole) if parts == "one" else (left_early,):
        for batches, posted in run_on(2, ahead, leave_at, parts):
            assert posted >= len(batches) - 4, "all but the first and those of another shape"
            assert len(batches) == len(ways)
            for (box, x, y), (whole, labels) in zip(batches, ways, strict=True):
                assert torch.equal(x, whole[box])
                assert torch.equal(y, labels)


# ---- going on -----------------------------------------------------------------------------------


def halves(layout: str, stop: int, parts: str) -> tuple[list[Any], list[Any]]:
    """A run that is left in the middle of an epoch, and one that goes on from its state."""
    found = []
    state: dict[str, Any] = {}
    for number in range(2):
        net = net_for(layout)
        mine = PARTS[parts](net.links.device) if net.links.devices > 1 else ALL
        run = tz.Run(
            net, loader=Pictures(mine), feeding={"batch_size": BATCH, "workers": 0, "mine": mine}
        )
        if number:
            run.load_state_dict(state)
        names: list[Any] = []
        for _ in run.epochs(EPOCHS):
            for _x, y in run.feed():
                names.append(y["name"])
                if not number and len(names) == stop:
                    state = run.state_dict()
        found.append(names)
    return found[0][stop:], found[1]


def test_a_run_goes_on_where_it_was() -> None:
    for devices in (1, 3):
        for rest, again in run_on(
            devices, halves, "tiles:1x1" if devices == 1 else "auto", 4, "thirds"
        ):
            assert rest == again
            assert len(again) == EPOCHS * 3 - 4


def struck(parts: str, device: int, method: str, at: int) -> dict[str, Any]:
    tz.init(recover=True)
    net = net_for()
    me = net.links.device
    if me == device:
        strike(net.links, method, die, at=at)
    if "ahead" in parts:
        choice.Choice.is_ahead = True  # type: ignore[assignment,method-assign]
    if parts == "ahead":
        return trained(net, Plainer(), **SIX)
    mine = PARTS[parts.removesuffix(" ahead")](me)
    return trained(net, Plainer(mine), mine=mine, **SIX)


def trained(net: tz.Net, data: Pictures, **options: Any) -> dict[str, Any]:
    losses, labels = [], []
    for _ in range(EPOCHS):
        for x, y in tz.feed(data, net, **options):
            loss = F.cross_entropy(net(x.double() / 255), y)
            loss.backward()
            losses.append(loss.item())
            labels += y.tolist()
    return {"losses": losses, "labels": labels, "members": net.links.members}


def unstruck() -> dict[str, Any]:
    return trained(net_for(), Plainer(), **SIX)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("parts", "method", "at"),
    [
        ("overlapping", "depart", 3), ("overlapping", "sum_later", 2), ("ahead", "depart", 9),
        ("overlapping ahead", "depart", 9),
    ],
)  # fmt: skip
def test_what_a_lost_device_had_is_read_by_another(parts: str, method: str, at: int) -> None:
    (right,) = run_on(1, unstruck)
    for fate in fates(3, struck, parts, 0, method, at)[1:]:
        assert fate.kind == "done", fate
        assert fate.what["members"] == (1, 2)
        assert fate.what["labels"] == right["labels"]
        assert fate.what["losses"] == pytest.approx(right["losses"], rel=1e-10)


@pytest.mark.timeout(120)
def test_what_only_a_lost_device_had_is_missed_in_words() -> None:
    for fate in fates(3, struck, "thirds", 2, "depart", 3)[:2]:
        assert (fate.kind, fate.what) == ("raised", "DataError")
        assert "no device has 3 of 11 samples (2, 5, 8)" in fate.message


# ---- refused ------------------------------------------------------------------------------------


def refused(kind: str) -> str:
    net = net_for()
    me = net.links.device
    options: dict[str, Any] = {"batch_size": BATCH, "mine": range(me, COUNT, 2), "workers": 0}
    data: Any = Pictures()
    if kind == "missing":
        options["mine"] = range(1, COUNT) if me else [1, 2]
    elif kind == "length":
        data, options["mine"] = Pictures(count=COUNT - me), range(5)
    elif kind == "bad":
        data = Pictures([i for i in ALL if i != 3])
    elif kind == "range":
        options["mine"] = [COUNT]
    elif kind == "collate":
        options["collate"] = lambda samples: torch.stack([x for x, _ in samples])
    elif kind == "loader":
        data, options = DataLoader(Pictures(), BATCH), {"mine": [1]}
    with pytest.raises(TerrazzoError) as found:
        for _ in tz.feed(data, net, **options):
            pass
    return f"{type(found.value).__name__}: {found.value}"


@pytest.mark.parametrize(
    ("kind", "errors", "words"),
    [
        ("missing", (DataError, DataError), "no device has 1 of 11 samples (0)"),
        ("length", (UsageError, UsageError), "11 samples in batches of 4"),
        ("bad", (RunError, DataError), "sample 3 of Pictures"),
        ("range", (UsageError, UsageError), "samples 11 to 11"),
        ("collate", (UsageError, UsageError), "row by row"),
        ("loader", (UsageError, UsageError), "data set without a loader"),
    ],
)
def test_refused_in_words(kind: str, errors: tuple[type, type], words: str) -> None:
    for message, error in zip(run_on(2, refused, kind), errors, strict=True):
        assert message.startswith(error.__name__), message
        assert words in message

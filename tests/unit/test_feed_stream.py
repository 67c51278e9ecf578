"""An iterable data set without a loader is read ahead where that pays, and stays what it is."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import terrazzo as tz
from terrazzo.errors import DataError, UsageError
from terrazzo.feed import draws, stream
from terrazzo.feed.alone import Alone
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.source import Options, Source
from terrazzo.feed.tuner import Limits, Settings, Tuner
from terrazzo.records.event import read_events
from terrazzo.records.stage import FETCH, stage_spans
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from patience import soon
from pictures import Files, flat
from test_feed_stamps import CHANGED, InOrder, change

COUNT = 22


class Numbers(IterableDataset[Any]):
    """In order; what else it does is for those below."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield self.sample(index), index

    @property
    def is_away(self) -> bool:
        return os.getpid() != self.owner

    def sample(self, index: int) -> Any:
        return torch.full((3,), float(index))


class Drawing(Numbers):
    """Draws, but not at first."""

    def sample(self, index: int) -> Any:
        noise = torch.rand(3) + random.random() + float(np.random.rand()) if index > 9 else 0.0
        return super().sample(index) + noise


class Turning(Numbers):
    """Counts its epochs when they begin."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from ((self.sample(index) * self.epoch, index) for index in range(COUNT))


class Ending(Numbers):
    """Counts its epochs when they have ended."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        yield from ((self.sample(index) + self.epoch, index) for index in range(COUNT))
        self.epoch += 1


class Asking(Numbers):
    """Would share its samples among workers."""

    def sample(self, index: int) -> Any:
        return torch.tensor(0 if get_worker_info() is None else 1)


class Failing(Numbers):
    """Cannot be read elsewhere."""

    def sample(self, index: int) -> Any:
        if self.is_away and index == 13:
            raise ValueError("no sample here")
        return super().sample(index)


class Dying(Numbers):
    def sample(self, index: int) -> Any:
        if self.is_away and index == 13:
            os._exit(3)
        return super().sample(index)


class Hanging(Numbers):
    def sample(self, index: int) -> Any:
        if self.is_away and index == 13:
            time.sleep(60)
        return super().sample(index)


class Own(Numbers):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(1)

    def sample(self, index: int) -> Any:
        return self.own.random()


def source_of(data: Any, *, workers: int | None = None) -> Source:
    loader = seeded_loader(
        data, seed=3, batch_size=4, shuffle=True, sampler=None, collate=None, drop_last=False
    )
    return Source(loader, Options(workers=workers, seed=3))


def ahead(data: Any) -> Source:
    """As if the tuner had found that it pays."""
    source = source_of(data)
    assert source.stream is not None
    source.stream.tuner = Tuner(Settings(1, 2), Limits(1, 2), fixed=True)
    return source


def seen(source: Source) -> list[Any]:
    """Some epochs, one of them left early, with a loop that draws; where generators stand then."""
    torch.manual_seed(7)
    random.seed(3)
    np.random.seed(5)
    found: list[Any] = []
    for epoch in range(4):
        for number, batch in enumerate(source):
            found += flat([batch])
            torch.rand(1)
            if (epoch, number) == (2, 2):
                break
    kind = draws.states()
    assert source.loader.generator is not None
    own = source.loader.generator.get_state().tolist()
    return [found, own, kind[0].tolist(), kind[1], kind[2][1].tolist(), kind[2][2:]]


REASONS = {
    Numbers: "",
    Asking: "",
    Drawing: "draw random numbers",
    Turning: "changes itself",
    Ending: "changes itself",
    Failing: "no sample here",
    Dying: "a worker could not read on",
    Hanging: "timed out",
    Own: "generator of its own",
}


@pytest.mark.parametrize("kind", REASONS)
def test_batches_are_those_of_the_loop(
    kind: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind in (Dying, Hanging):  # of the others none may be late, however busy this machine is
        monkeypatch.setattr(stream, "LONG_S", 1.0)
    source = ahead(kind())
    assert seen(source) == seen(source_of(kind(), workers=0))
    assert source.stream is not None
    assert REASONS[kind] in source.stream.reason
    assert bool(source.stream.reason) == bool(REASONS[kind])
    told = [line for line in capfd.readouterr().err.splitlines() if "training process" in line]
    assert len(told) == bool(REASONS[kind])


def test_a_worker_that_dies_is_not_felt_elsewhere_in_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "LONG_S", 1.0)
    found: list[int] = []
    for _, index in ahead(Dying()):
        found += index.tolist()
        time.sleep(0.3)  # it dies here, two batches ahead
    assert found == list(range(COUNT))


class Watch:
    """A clock that goes on only as it is told to; the one of a worker is another."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


WATCH = Watch()


class Slow(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for index in range(4 * 24):
            WATCH.now_s += 0.005
            yield self.is_away, index


def test_the_tuner_reads_ahead_where_steps_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stream, "time", WATCH)
    source, away = source_of(Slow()), []
    for _ in range(4):
        rows: list[int] = []
        for where, index in source:
            rows += index.tolist()
            away.append(bool(where.all()))
            WATCH.now_s += 0.03
        assert rows == list(range(4 * 24))
    assert not any(away[:24]), "the first epoch shows whether steps wait"
    assert all(away[24:])
    assert "1 worker, 2 batches ahead" in capfd.readouterr().err


def test_a_loop_that_does_not_wait_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "time", WATCH)
    source = source_of(Numbers())
    for _ in range(12):
        for _ in source:
            WATCH.now_s += 0.1
    assert source.stream is not None
    assert source.stream.tuner.latest is not None, "it has looked"
    assert source.stream.tuner.settings == Settings()


@pytest.mark.parametrize("make", [ahead, lambda data: source_of(data, workers=0)])
@pytest.mark.parametrize("kind", [Numbers, Drawing])
def test_going_on_in_the_middle_of_an_epoch(kind: Any, make: Any) -> None:
    torch.manual_seed(1)
    source = make(kind())
    list(source)
    way = Alone(source)
    batches = iter(way)
    first = flat([next(batches) for _ in range(3)])
    where, kept = way.where(), draws.states()
    rest = flat(batches)
    again = Alone(make(kind()))
    draws.restore(kept)
    again.go_on_from(where)
    assert flat(again) == rest
    assert len(first) + len(rest) == 6


def test_a_file_that_changes_is_told_by_the_loop(tmp_path: Path) -> None:
    files = Files(tmp_path / "data")
    source = ahead(InOrder(files))
    list(source)
    change(files.path(5))
    with pytest.raises(DataError, match=CHANGED) as caught:
        list(source)
    assert str(caught.value).startswith("batch 1 of InOrder: ")


def test_workers_0_keeps_it_in_the_loop() -> None:
    assert source_of(Numbers(), workers=0).stream is None


# ---- with a loader of its own, or workers that were asked for ------------------------------------


def test_with_a_loader_it_is_taken_as_it_is() -> None:
    loader = DataLoader(Numbers(), batch_size=8)
    source = Source(loader, Options(workers=2))
    assert flat(source) == flat(loader)
    assert source.pool is None


class Told(Numbers):
    """Tells in memory that all processes share how many samples it has given."""

    given = multiprocessing.get_context("fork").Value("q", 0)

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            with self.given:
                self.given.value += 1
            yield self.is_away, index


@pytest.mark.parametrize("workers", [None, 1])
def test_workers_1_reads_ahead_from_the_first_batch_on(
    workers: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(2, 3, 8, 8),))
    data, found = Told(), list[int]()
    Told.given.value = 0

    def is_ahead() -> bool:
        return Told.given.value >= min(len(found) + 4, COUNT)

    for away, index in tz.feed(data, net, batch_size=4, workers=workers):
        found += index.tolist()
        assert bool(away.all()) == bool(away.any()) == bool(workers)
        if workers:
            soon(is_ahead)
        else:
            assert Told.given.value == len(found), "when it is asked, no sooner"
    assert found == list(range(COUNT))
    assert "cannot make batches" not in capsys.readouterr().err


def test_more_workers_would_each_read_all_of_it() -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(2, 3, 8, 8),))
    with pytest.raises(UsageError, match="each of them would read all"):
        next(tz.feed(Numbers(), net, batch_size=4, workers=2))


class Read(IterableDataset[Any]):
    """A stream of files."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            time.sleep(0.002)
            yield torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def test_stages_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(12):
        (tmp_path / f"data/{number:02}").write_bytes(bytes(5000))
    recorder = Recorder(tmp_path / "run", 0)
    loader = DataLoader(Read(tmp_path / "data"), batch_size=3)
    for _ in Source(loader, Options(), recorder=lambda: recorder):
        pass
    recorder.flush()
    spans = [span for span in stage_spans(read_events(tmp_path / "run")) if span.stage == FETCH]
    assert [span.samples for span in spans] == [3, 3, 3, 3]
    assert all(15_000 <= span.bytes < 30_000 for span in spans)
    assert all(0.006 <= span.worked_s <= span.end_s - span.begin_s + 1e-4 for span in spans)

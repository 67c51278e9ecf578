"""An iterable data set without a loader is read ahead where that pays, and stays what it is."""

from __future__ import annotations

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
from torch.utils.data import IterableDataset, get_worker_info

from terrazzo.errors import DataError
from terrazzo.feed import draws, stream
from terrazzo.feed.alone import Alone
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.source import Options, Source
from terrazzo.feed.tuner import Limits, Settings, Tuner

sys.path.insert(0, str(Path(__file__).parent))
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


class Slow(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for index in range(4 * 24):
            time.sleep(0.005)
            yield self.is_away, index


def test_the_tuner_reads_ahead_where_steps_wait(capfd: pytest.CaptureFixture[str]) -> None:
    source, away = source_of(Slow()), []
    for _ in range(4):
        rows: list[int] = []
        for where, index in source:
            rows += index.tolist()
            away.append(bool(where.all()))
            time.sleep(0.03)
        assert rows == list(range(4 * 24))
    assert not any(away[:24]), "the first epoch shows whether steps wait"
    assert all(away[-24:])
    assert "1 worker, 2 batches ahead" in capfd.readouterr().err


def test_a_loop_that_does_not_wait_is_left_alone() -> None:
    source = source_of(Numbers())
    for _ in range(4):
        for _ in source:
            time.sleep(0.1)
    assert source.stream is not None
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

"""A source gives the batches of its loader to the bit, whoever makes them, and when."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

import terrazzo as tz
from terrazzo.errors import UsageError
from terrazzo.feed import draws, trays
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.source import Options, Source
from terrazzo.feed.tuner import Change, Limits, Mean, Settings, Tuner
from terrazzo.records.event import read_events
from terrazzo.records.stage import stage_spans
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from pictures import SIZE, Numbers, flat

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
Make = Callable[[], "DataLoader[Any]"]
EPOCHS = 3


def seen(make: Make, wrap: Callable[[DataLoader[Any]], Iterable[Any]]) -> list[Any]:
    """All batches of some epochs, and where all generators stand in the end.

    The loop draws random numbers, too, as a model with dropout would, in one of the epochs.
    """
    torch.manual_seed(7)
    random.seed(3)
    np.random.seed(5)
    loader = make()
    batches = wrap(loader)
    found: list[Any] = []
    for epoch in range(EPOCHS):
        for batch in batches:
            found += flat([batch])
            if epoch == 1:
                torch.rand(1)
    own = None if loader.generator is None else loader.generator.get_state().tolist()
    kind = draws.states()
    return [found, own, kind[0].tolist(), kind[1], kind[2][1].tolist(), kind[2][2:]]


def same(make: Make, **options: Any) -> Source:
    sources = []

    def wrap(loader: DataLoader[Any]) -> Source:
        sources.append(Source(loader, Options(**options)))
        return sources[0]

    assert seen(make, wrap) == seen(make, lambda loader: loader)
    return sources[0]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("random_samples", [False, True])
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_are_those_of_the_loader(
    loader_workers: int, random_samples: bool, own_generator: bool, workers: int
) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(9) if own_generator else None
        return DataLoader(
            Numbers(draws=random_samples), batch_size=4, shuffle=True, generator=generator,
            num_workers=loader_workers,
        )  # fmt: skip

    source = same(make, workers=workers)
    stays = random_samples and not loader_workers
    assert bool(source.reason) == stays, "draws of the training process cannot be made elsewhere"
    assert source.pool is not None


class Backwards(Sampler[int]):
    """A sampler of a script's own, which sees how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        for index in reversed(range(SIZE)):
            self.asked += 1
            yield index


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "sampler": WeightedRandomSampler([1.0] * SIZE, 50)},
        {"batch_size": 4, "collate_fn": lambda rows: [torch.stack([x for x, _ in rows])]},
    ],
    ids=["drop_last", "not batched", "weighted", "collate"],
)
def test_other_loaders(options: dict[str, Any]) -> None:
    source = same(lambda: DataLoader(Numbers(), **options), workers=2)
    assert source.pool is not None


def test_a_sampler_of_the_script_is_not_asked_ahead() -> None:
    sampler = Backwards()
    source = Source(DataLoader(Numbers(), 4, sampler=sampler), Options(workers=2))
    next(iter(source))
    assert sampler.asked == 4
    assert "Backwards" in source.reason


class Own(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(4)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + self.draw.random(), index


def test_a_generator_of_the_data_set_itself_stays_in_order() -> None:
    assert "generator of its own" in same(lambda: DataLoader(Own(), 4), workers=2).reason


def test_batches_that_fit_no_tray_come_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trays, "TRAY_BYTES", 1 << 12)
    monkeypatch.setattr(trays, "TRAYS", 3)

    def make() -> DataLoader[Any]:
        return DataLoader(Large(count=21), batch_size=4, shuffle=True)

    same(make, workers=2, ahead=8)


class Large(Numbers):
    """Some batches are larger than a tray, and some smaller."""

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x.repeat(1, 100), label


def test_workers_may_come_and_go_within_an_epoch() -> None:
    path = iter([0, 0, 1, 3, 3, 1, 0, 0, 2, 0] * 3)

    class Restless(Tuner):
        def step(self, **times: float) -> Change:
            workers = next(path)
            return self._change(Settings(workers, 2 * workers), Mean(1.0, 0.5, 0.0), "at random")

    def wrap(loader: DataLoader[Any]) -> Source:
        source = Source(loader, Options())
        source.tuner = Restless(Settings(), Limits(8, 16))
        sources.append(source)
        return source

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=4, shuffle=True)

    sources: list[Source] = []
    assert seen(make, wrap) == seen(make, lambda loader: loader)
    assert sources[0].pool is not None
    assert sources[0].pool.workers == 0, "the last of the path"


# ---- the border between two epochs ----------------------------------------------------------


def loaded(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def test_the_next_epoch_is_begun_before_this_one_ends() -> None:
    torch.manual_seed(1)
    source = Source(loaded(), Options(workers=2))
    list(source)
    ahead = [item.indices for item in source._foreseen if item.ticket is not None]
    assert len(ahead) >= 3
    right = list(flat(source))
    assert [row[1] for row in right[: len(ahead)]] == ahead


def test_what_was_foreseen_wrongly_is_thrown_away() -> None:
    torch.manual_seed(1)
    source = Source(loaded(), Options(workers=2))
    list(source)
    torch.manual_seed(2)
    found = flat(source)
    torch.manual_seed(2)
    assert found == flat(loaded())


def test_leaving_early_leaves_generators_where_the_loader_would() -> None:
    ends = []
    for wrap in (lambda loader: loader, lambda loader: Source(loader, Options(workers=2))):
        torch.manual_seed(1)
        batches = wrap(loaded())
        for _ in zip(range(2), batches, strict=False):
            pass
        ends.append((flat(batches), torch.get_rng_state().tolist()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("leaves_after", [7, 8, 9, 10])
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_the_end_is_asked_for_when_the_loader_would(loader_workers: int, leaves_after: int) -> None:
    """Where a script has the generator of the sampler, it may draw from it, and leave early."""
    ends = []
    for wrap in (lambda loader: loader, lambda loader: Source(loader, Options(workers=1, ahead=3))):
        own = torch.Generator().manual_seed(3)
        batches, found = wrap(loaded(generator=own, num_workers=loader_workers)), []
        for number, batch in enumerate(batches):
            found += [flat([batch]), torch.rand(1, generator=own).item()]
            if number + 1 == leaves_after:
                break
        ends.append((found, flat(batches), own.get_state().tolist()))
    assert ends[0] == ends[1]


# ---- a data set that a script changes -------------------------------------------------------


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_workers_follow_a_data_set_that_changes(loader_workers: int) -> None:
    def changing(wrap: Callable[[DataLoader[Any]], Iterable[Any]]) -> list[Any]:
        data = Numbers()
        loader = DataLoader(data, 4, num_workers=loader_workers)
        batches, found = wrap(loader), []
        for epoch in range(2):
            data.scale = 2.0 + epoch
            for number, batch in enumerate(batches):
                found += flat([batch])
                if number == 3:
                    data.scale = -1.0
        return found

    assert changing(lambda loader: Source(loader, Options(workers=2))) == changing(
        lambda loader: loader
    )


# ---- a data set without a loader ------------------------------------------------------------


def seeded(dataset: Dataset[Any], workers: int | None, seed: int = 5) -> Source:
    loader = seeded_loader(
        dataset, seed=seed, batch_size=4, shuffle=True, sampler=None, collate=None, drop_last=False
    )
    return Source(loader, Options(workers=workers, seed=seed))


def test_samples_with_their_own_seeds_are_the_same_for_any_number_of_workers() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = []
    for workers in (0, 1, 3):
        source = seeded(Numbers(draws=True), workers)
        found.append([flat(source), flat(source)])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1], "another epoch is another order, and other draws"
    assert flat(seeded(Numbers(draws=True), 0, seed=6)) != found[0][0]
    assert torch.equal(torch.get_rng_state(), before), "the script's generator is left alone"


def test_going_back_throws_away_what_was_made_for_the_next_epoch() -> None:
    """In the order of the set all epochs begin with the same indices, but draw other numbers."""

    def ordered() -> Source:
        data = Numbers(draws=True)
        loader = seeded_loader(
            data, seed=5, batch_size=4, shuffle=False, sampler=None, collate=None, drop_last=False
        )
        return Source(loader, Options(workers=1, seed=5))

    source = ordered()
    told = source.chance()
    first = flat(source)
    assert source._foreseen
    source.draw_as(told)
    assert flat(source) == first


class Watched(Numbers):
    made = 0

    def __getitem__(self, index: int) -> Any:
        Watched.made += 1
        return super().__getitem__(index)


def test_going_on_in_the_middle_makes_nothing_twice() -> None:
    source = seeded(Watched(draws=True), 0)
    list(source)
    told = json.loads(json.dumps(source.chance()))
    whole = flat(source)
    other = seeded(Watched(draws=True), 0)
    other.draw_as(told)
    Watched.made = 0
    assert flat(other.begin(6)) == whole[6:]
    assert Watched.made == SIZE - 6 * 4


# ---- the record -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_every_stage_of_every_batch_is_recorded(tmp_path: Path, workers: int) -> None:
    recorder = Recorder(tmp_path, 0)
    source = Source(loaded(), Options(workers=workers), recorder=lambda: recorder)
    list(source)
    recorder.flush()
    events = list(read_events(tmp_path))
    spans = list(stage_spans(events))
    batches = -(-SIZE // 4)
    for stage in ("fetch", "prepare", "collate", "wait"):
        own = [span for span in spans if span.stage == stage]
        assert [span.batch for span in own] == list(range(batches)), stage
        assert all(span.is_beside == (stage != "wait") for span in own)
        assert all(0 <= span.worked_s <= span.end_s - span.begin_s + 1e-4 for span in own)
    assert {span.worker for span in spans} == ({0, 1} if workers else {-1})
    (end,) = [dict(event.values) for event in events if event.name == "epoch"]
    assert (end["samples"], end["batches"]) == (SIZE, batches)


class Rows:
    """Inherits from nothing."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < 11:
            raise IndexError(index)
        return torch.full((3, 8, 8), float(index)), index


class SameRows(Rows, Dataset[Any]):
    pass


def test_whatever_has_a_length_and_numbered_samples_is_a_data_set() -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(4, 3, 8, 8),))

    def numbers(data: Any) -> list[list[list[int]]]:
        return [[y.tolist() for _, y in tz.feed(data, net, batch_size=4)] for _ in range(2)]

    rows = Rows()
    right = numbers(SameRows())
    assert numbers(rows) == right
    assert numbers([rows[index] for index in range(11)]) == right
    assert sorted(number for batch in right[0] for number in batch) == list(range(11))
    assert right[0] != right[1], "every epoch is shuffled anew"
    with pytest.raises(UsageError, match="a length and numbered samples"):
        next(iter(tz.feed(iter([1]), net, batch_size=4)))

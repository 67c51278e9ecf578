"""What copies in other processes would do otherwise is left where the loader has it."""

from __future__ import annotations

import random
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from terrazzo.errors import DataError
from terrazzo.feed.passage import DRAWS
from terrazzo.feed.rehearsal import STREAM_DRAWS, Rehearsal
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.source import Options, Source
from terrazzo.feed.stays import copies_reason, stays_reason
from terrazzo.feed.tuner import MOST_WORKERS, Settings
from terrazzo.records.trial import WARM, Trial

sys.path.insert(0, str(Path(__file__).parent))
from pictures import SIZE, Numbers, flat

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
RNG = np.random.default_rng(0)
EPOCHS = 2


def two_ways(make: Callable[[], DataLoader[Any]]) -> Source:
    """Epochs of the loader itself and of its source, which must be the same."""
    found: list[Any] = []
    for wrap in (lambda loader: loader, lambda loader: Source(loader, Options(workers=2))):
        torch.manual_seed(7)
        batches: Iterable[Any] = wrap(make())
        found.append([flat(batches) for _ in range(EPOCHS)])
    assert found[0] == found[1]
    assert isinstance(batches, Source)
    return batches


class Shifted(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, label in super().__iter__():
            yield x + 1000, label


def test_a_loader_with_its_own_way_is_used_as_it_is() -> None:
    two_ways(lambda: Shifted(Numbers(), 4, shuffle=True))


def test_workers_that_stay_keep_their_draws() -> None:
    source = two_ways(
        lambda: DataLoader(
            Numbers(draws=True), 4, shuffle=True, num_workers=2, persistent_workers=True
        )
    )
    assert "persistent_workers" in source.reason


def shaken(x: torch.Tensor) -> torch.Tensor:
    return x + RNG.random()


class Shaken(Numbers):
    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return shaken(x), label


def test_a_generator_of_the_module_is_drawn_from_in_order() -> None:
    global RNG

    def make() -> DataLoader[Any]:
        global RNG
        RNG = np.random.default_rng(0)
        return DataLoader(Shaken(), 4)

    assert "generator" in two_ways(make).reason


class Opened(Dataset[Any]):
    """All samples in one file, which is opened at once or when the first one is wanted."""

    def __init__(self, path: Path, *, late: bool) -> None:
        path.write_bytes(bytes(range(SIZE)))
        self.path = path
        self.file: Any = None if late else path.open("rb")

    def __len__(self) -> int:
        return SIZE

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index)
        return self.file.read(1)[0], index


def test_an_open_file_is_read_by_one_process(tmp_path: Path) -> None:
    assert "open" in two_ways(lambda: DataLoader(Opened(tmp_path / "a", late=False), 4)).reason
    late = Opened(tmp_path / "b", late=True)
    source = Source(DataLoader(late, 4), Options(workers=2))
    assert not source.reason
    assert late[3] == (3, 3)
    assert flat(source) == flat(DataLoader(late, 4))
    assert "BufferedReader" in source.reason
    assert source.pool is None


class Holds(Numbers):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what


def test_what_is_open_and_what_is_not(tmp_path: Path) -> None:
    with sqlite3.connect(":memory:") as connection:
        assert "Connection" in copies_reason(Holds(connection))
    connection.close()
    assert "generator" in copies_reason(Holds([lambda: iter(()), (i for i in range(3))]))
    for harmless in (
        threading.Lock(), lambda x: x, torch.nn.Linear(2, 2), {"a": (1, 2)}, tmp_path, Numbers(),
        np.zeros(3), torch.rand, np.random.rand, str.lower, memoryview(b"a"), struct.Struct("<q"),
    ):  # fmt: skip
        assert copies_reason(Holds(harmless)) == "", harmless


def test_workers_that_cannot_be_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(":memory:") as connection:
        Source(DataLoader(Holds(connection), 4), Options(workers=2))
    connection.close()
    assert "workers=2 cannot make batches" in capsys.readouterr().err


def test_workers_that_a_script_wants_get_its_files(tmp_path: Path) -> None:
    data = Opened(tmp_path / "a", late=False)
    assert stays_reason(DataLoader(data, 4, num_workers=1)) == ""


class Locked(Numbers):
    """Its batches cannot be handed over from one process to another."""

    def __getitem__(self, index: int) -> Any:
        return threading.Lock(), index


def test_nothing_fails_because_of_workers_nobody_asked_for() -> None:
    loader = DataLoader(Locked(), 4, collate_fn=list)
    source = Source(loader, Options())
    source.tuner.settings = Settings(workers=1, ahead=2)
    assert [[label for _, label in batch] for batch in source] == [
        [label for _, label in batch] for batch in loader
    ]
    assert "could not be handed over" in source.reason
    with pytest.raises(DataError, match="could not be handed over"):
        next(iter(Source(loader, Options(workers=1))))


@pytest.mark.parametrize("sampler", [np.arange(5)[::-1], list("abc"), []], ids=str)
def test_samples_are_named_by_whatever_the_sampler_gives(sampler: Any) -> None:
    class Named(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return float(torch.rand(1)), str(index)

    loader = seeded_loader(
        Named(), seed=1, batch_size=2, shuffle=True, sampler=sampler, collate=list, drop_last=False
    )
    batches = list(Source(loader, Options(workers=0, seed=1)))
    assert [name for batch in batches for _, name in batch] == [str(one) for one in sampler]


def seeded(data: Dataset[Any]) -> DataLoader[Any]:
    return seeded_loader(
        data, seed=1, batch_size=4, shuffle=True, sampler=None, collate=None, drop_last=False
    )


@pytest.mark.parametrize(
    ("loader", "most", "why"),
    [
        (DataLoader(Numbers(), 4), MOST_WORKERS, ""),
        (DataLoader(Numbers(draws=True), 4), 0, DRAWS),
        (DataLoader(Numbers(draws=True), 4, num_workers=2), 2, ""),
        (seeded(Numbers(draws=True)), MOST_WORKERS, ""),
        ([torch.zeros(1)], 0, "batches come from list as it is"),
    ],
)
def test_a_trial_tells_how_many_workers_could_make_the_same(
    loader: Any, most: int, why: str, tmp_path: Path
) -> None:
    trial = Rehearsal(Trial(WARM, 3), tmp_path)
    trial.watch.has_begun = True  # there is no end to it but that of the process
    trial.loader(loader)
    assert trial.workers() == (most, why)


class Counted(IterableDataset[int]):
    def __init__(self, *, draws: bool = False, own: Any = None) -> None:
        self.draws, self.own = draws, own

    def __iter__(self) -> Iterator[int]:
        return iter(number + int(self.draws and torch.randint(9, ())) for number in range(9))


@pytest.mark.parametrize(
    ("data", "most", "why"),
    [
        (Counted(), 1, ""),
        (Counted(draws=True), 0, STREAM_DRAWS),
        (Counted(own=random.Random(1)), 0, "the data set has a random generator of its own"),
    ],
)
def test_a_stream_without_a_loader_can_be_read_ahead_by_one(
    data: Counted, most: int, why: str, tmp_path: Path
) -> None:
    trial = Rehearsal(Trial(WARM, 3), tmp_path)
    trial.watch.has_begun = True
    trial.loader(seeded(data), is_made=True)
    assert trial.workers() == (most, why)
    trial.loader(DataLoader(data, 4))
    assert trial.workers()[0] == 0
    assert "give the data set itself" in trial.workers()[1]

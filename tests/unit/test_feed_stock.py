"""What a net holds: in one budget, for all feeds of a data set, with workers and without."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from terrazzo.feed import stock as stock_module
from terrazzo.feed.arbiter import Memory
from terrazzo.feed.form import DECODED, ENCODED
from terrazzo.feed.held import FULL_AFTER, LATEST, Held, choose_form
from terrazzo.feed.ledger import Ledger
from terrazzo.feed.pantry import Address
from terrazzo.feed.source import Options, Source
from terrazzo.feed.stock import Stock
from terrazzo.feed.task import Made
from terrazzo.feed.tuner import Change, Limits, Mean, Settings, Tuner
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Files, Numbers, flat
from test_feed_cache import Augmented, Steps, epochs, read_bytes, source_of

MIB = 1 << 20


def of(loader: DataLoader[Any], run: Path | None = None, **options: Any) -> Source:
    stock = options.pop("stock", None)
    recorder = None if run is None else Recorder(run, 0)
    return Source(loader, Options(**options), recorder=lambda: recorder, stock=stock)


# ---- without workers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Files, Augmented, Steps])
def test_samples_are_held_without_workers(tmp_path: Path, kind: Any) -> None:
    data = kind(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB, workers=0)
    found = epochs(source, 4)
    assert source.held is not None
    assert len(source.held.places) == len(data)
    assert source.pool is None
    assert read_bytes(tmp_path / "run")[0] >= data.total_bytes
    assert read_bytes(tmp_path / "run")[2:] == [0, 0]
    assert found == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 4)


def test_a_loader_whose_samples_draw_is_held_without_changing_a_draw(tmp_path: Path) -> None:
    data, ends = Augmented(tmp_path / "data"), []
    for wrap in (lambda loader: loader, lambda loader: of(loader, tmp_path, cache_bytes=MIB)):
        torch.manual_seed(1)
        random.seed(1)
        batches = wrap(DataLoader(data, 4, shuffle=True))
        found = [flat(batches) for _ in range(3)]
        ends.append((found, torch.get_rng_state().tolist(), random.getstate()))
    assert ends[0] == ends[1]
    assert batches.held.form == ENCODED
    assert len(batches.held.places) == len(data)
    batches.recorder().flush()
    assert read_bytes(tmp_path)[2] == 0


def test_what_is_held_stays_when_the_last_worker_goes(tmp_path: Path) -> None:
    path = iter([0, 1, 1, 1, 0, 0] * 20)

    class Restless(Tuner):
        def step(self, **times: float) -> Change:
            workers = next(path)
            return self._change(Settings(workers, 2 * workers), Mean(1.0, 0.5, 0.0), "by turns")

    data = Augmented(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB, workers=1)
    source.tuner = Restless(Settings(), Limits(8, 16))
    found = epochs(source, 5)
    assert source.held is not None
    assert len(source.held.places) == len(data)
    assert read_bytes(tmp_path / "run")[4] == 0
    assert found == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 5)


def test_a_cache_that_cannot_be_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    source = of(DataLoader(Numbers(draws=True, count=200), 8), cache_bytes=MIB, workers=0)
    list(source)
    list(source)
    assert capfd.readouterr().err.count("no samples are held") == 1


# ---- a data set that changes ----------------------------------------------------------------


class Epochs(Augmented):
    """Told the epoch, as many are; its files stay the same."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x + self.epoch, label


@pytest.mark.parametrize("workers", [0, 1])
def test_files_stay_held_when_the_data_set_is_changed(tmp_path: Path, workers: int) -> None:
    data, found = Epochs(tmp_path / "data"), []
    for name, cache_bytes, count in (("run", MIB, workers), ("plain", 0, 0)):
        source = source_of(data, tmp_path / name, cache_bytes=cache_bytes, workers=count)
        rows = []
        for epoch in range(4):
            data.set_epoch(epoch)
            rows += epochs(source, 1)
        found.append(rows)
    assert found[0] == found[1]
    assert read_bytes(tmp_path / "run")[2:] == [0, 0]


class Sizes(Files):
    """Reads other files when it is told to."""

    suffix = ""

    def path(self, index: int) -> Path:
        return self.folder / f"{index:03}.bin{self.suffix}"


def test_other_files_are_read_and_held_anew(tmp_path: Path) -> None:
    data = Sizes(tmp_path / "data")
    for index in range(len(data)):
        other = data.folder / f"{index:03}.bin.small"
        other.write_bytes(bytes([index]) * 100)
    source = source_of(data, tmp_path / "run", cache_bytes=MIB, workers=1)
    source.hold()
    assert source.held is not None
    source.held.only_encoded()
    epochs(source, 3)
    data.suffix = ".small"
    epochs(source, 5)
    found = read_bytes(tmp_path / "run")
    assert found[2] == 0
    assert found[3] == 100 * len(data)
    assert found[7] == 0, "what nobody opens any more made room"


class Restive(Numbers):
    def __getitem__(self, index: int) -> Any:
        self.scale += 1.0
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_data_set_that_changes_itself_stays(
    workers: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    source, loader = of(DataLoader(Restive(), 4), workers=workers), DataLoader(Restive(), 4)
    assert flat(source) + flat(source) == flat(loader) + flat(loader)
    assert "changes itself" in source.reason
    assert "changes itself" in capfd.readouterr().err


class Lazy(Numbers):
    """Makes what it needs with its first sample, as many do."""

    table: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.table is None:
            self.table = torch.arange(100)
        return self.table[index], index


def test_a_data_set_that_only_begins_late_does_not() -> None:
    source = of(DataLoader(Lazy(), 4), workers=2)
    assert flat(source) == flat(DataLoader(Lazy(), 4))
    assert source.reason == ""


def test_a_script_that_changes_it_at_each_step_has_no_workers() -> None:
    data, starts = Numbers(), []
    source = of(DataLoader(data, 4), workers=1)
    found = []
    for number, batch in enumerate(source):
        found.append(batch[0][0, 0, 0].item())
        data.scale = number + 2.0
        starts += [] if source.pool is None else source.pool.processes
    assert found == [4 * number * (number + 1.0) for number in range(len(found))]
    assert len(set(starts)) <= 3
    assert "between steps" in source.reason


# ---- one budget -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device whose free memory the test sets; what is held counts."""
    now = {"free": 1024 * MIB}

    class Here(Memory):
        @classmethod
        def here(cls) -> Memory:
            return Memory(1024 * MIB, now["free"], 0, 0)

    monkeypatch.setattr(stock_module, "Memory", Here)
    return now


def filled(stock: Stock, data: Any, asked_bytes: int | None, size: int) -> Held:
    held = stock.held_of(data, asked_bytes=asked_bytes, seed=0, device=0)
    for index in range(size // MIB):
        place = held.arena.put(bytes(MIB))
        if place is not None:
            held.places.lay(index, place, MIB)
    return held


def test_two_sets_share_one_budget(memory: dict[str, int]) -> None:
    stock, train, test = Stock(), Numbers(), Numbers()
    first = filled(stock, train, 20 * MIB, 16 * MIB)
    second = filled(stock, test, 20 * MIB, 16 * MIB)
    assert len(first.places) == 16
    assert len(second.places) == 3
    assert stock.held_bytes <= 20 * MIB


def test_who_is_not_read_gives_back_first(memory: dict[str, int]) -> None:
    stock, train, test = Stock(), Numbers(), Numbers()
    idle = filled(stock, test, 64 * MIB, 20 * MIB)
    active = filled(stock, train, 64 * MIB, 20 * MIB)
    before = active.held_bytes
    memory["free"] = 64 * MIB - 5 * MIB
    assert stock.mind(active) >= 5 * MIB
    assert active.held_bytes == before
    assert idle.held_bytes < 15 * MIB
    memory["free"] = 0
    stock.mind(active)
    assert stock.held_bytes == 0, "the model comes first"


def test_small_changes_of_memory_change_nothing(memory: dict[str, int]) -> None:
    stock, data = Stock(), Numbers()
    memory["free"] = 164 * MIB
    held = filled(stock, data, None, 60 * MIB)
    before, limit = held.held_bytes, held.arena.limit_bytes
    memory["free"] -= before
    for change in (-1, 1, -1, 1):
        memory["free"] += change * MIB
        assert stock.mind(held) == 0
    assert (held.held_bytes, held.arena.limit_bytes) == (before, limit)
    memory["free"] -= 20 * MIB
    assert stock.mind(held) > 0, "a large change does"


def test_what_workers_put_in_meanwhile_is_not_taken_for_given_back(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, int]
) -> None:
    stock, data, room_bytes = Stock(), Numbers(), stock_module.room_bytes
    held = filled(stock, data, 100 * MIB, 20 * MIB)

    def meanwhile(*args: Any, **options: Any) -> int:
        held.arena.put(bytes(MIB))
        return room_bytes(*args, **options)

    monkeypatch.setattr(stock_module, "room_bytes", meanwhile)
    assert stock.mind(held) == 0, "or a user is told that memory is short"
    assert held.held_bytes > 20 * MIB


def test_a_new_loader_of_the_same_data_finds_what_is_held(tmp_path: Path) -> None:
    data, stock = Augmented(tmp_path / "data"), Stock()
    for epoch in range(3):
        loader = DataLoader(data, 4, shuffle=True)
        source = of(loader, tmp_path / f"{epoch}", cache_bytes=MIB, workers=0, stock=stock)
        epochs(source, 1)
    assert read_bytes(tmp_path / "2") == [0]


def test_a_new_loader_does_not_take_what_was_held_of_another_state() -> None:
    data, stock, found = Numbers(), Stock(), []
    for scale in (1.0, 2.0):
        data.scale = scale
        source = of(DataLoader(data, 4), cache_bytes=MIB, workers=0, stock=stock)
        found.append([flat(source) for _ in range(2)])
        assert found[-1] == [flat(DataLoader(data, 4))] * 2
    assert source.held is not None
    assert source.held.form == DECODED, "or nothing was tried"


def test_what_is_held_goes_with_the_data_set() -> None:
    stock, data = Stock(), Numbers()
    filled(stock, data, MIB, MIB)
    assert len(stock._helds) == 1
    del data
    assert len(stock._helds) == 0


# ---- books ----------------------------------------------------------------------------------


def test_a_ledger_is_small_and_right() -> None:
    ledger = Ledger(100_000, 3)
    for index in range(0, 100_000, 2):
        ledger.put(index, (index, 1 << 43, 7))
    ledger.put("a name", (1, 2, 3))
    ledger.put(-5, (4, 5, 6))
    assert len(ledger) == 50_002
    assert ledger.get(99_998) == (99_998, 1 << 43, 7)
    assert ledger.get(1) is None
    assert ledger.get("a name") == (1, 2, 3)
    assert sys.getsizeof(ledger._rows) < 26 * 100_000
    ledger.drop(4)
    ledger.drop(4)
    ledger.put(2, (9, 9, 9))
    assert len(ledger) == 50_001
    assert 4 not in ledger
    assert set(ledger) == {*range(0, 100_000, 2), "a name", -5} - {4}


def test_what_is_known_of_sizes_does_not_grow() -> None:
    held = Stock().held_of(Numbers(), asked_bytes=MIB, seed=0, device=0)
    for number in range(2000):
        held.note(Made(key=held.key, sizes=[(ENCODED, 100 + number % 2, float(number))]))
    assert held.means()[ENCODED] == (100.5, 1999 - LATEST / 2 + 0.5)
    assert len(held._weights[ENCODED].saved_s) == LATEST


def test_of_two_forms_that_save_as_much_the_smaller_is_held() -> None:
    sizes = {DECODED: (1000.0, 0.0102), ENCODED: (100.0, 0.010)}
    assert choose_form(sizes, samples=100, room_bytes=1_000_000) == ENCODED


def test_only_who_does_not_have_a_sample_is_offered_it_again() -> None:
    peer = Address(1, "127.0.0.1", 1, "", 1 << 40)
    held = Stock().held_of(Numbers(count=9), asked_bytes=MIB, seed=0, device=0)
    held.share([peer])
    indices = list(held.shelved(range(9)).give)
    assert len(indices) > 4, "its memory is the larger"
    held.note(Made(key=held.key, given=dict.fromkeys(indices, 1)))
    assert set(held.shelved(range(9)).away) == set(indices)
    held.note(Made(key=held.key))  # it was slower than storage, and not asked
    assert set(held.shelved(range(9)).away) == set(indices)
    held.note(Made(key=held.key, missed=indices[:2]))
    assert set(held.shelved(range(9)).give) == set(indices[:2])
    held.note(Made(key=held.key, refused=[1] * FULL_AFTER))
    assert not held.shelved(range(9)).give, "it is full"
    held.widen()
    assert set(held.shelved(range(9)).give) == set(indices[:2]), "a new epoch asks again"
    held.note(Made(key=held.key, liars={1}))
    assert not held.shelved(range(9)).away
    held.share([peer])
    assert not held.peers, "who has lied is not believed again"


def test_bytes_read_for_batches_that_nobody_wanted_are_counted(tmp_path: Path) -> None:
    data = Files(tmp_path / "data")
    loader = DataLoader(data, 4, shuffle=True, num_workers=1)
    source = of(loader, tmp_path / "run", workers=1, cache_bytes=0)
    for _ in range(5):
        list(source)
        torch.rand(3)  # so that each epoch begins otherwise than it was foreseen
    recorder = source.recorder()
    assert recorder is not None
    recorder.flush()
    rows = [dict(e.values) for e in read_events(tmp_path / "run") if e.name == "epoch"]
    found = [row["read_bytes"] / data.total_bytes for row in rows]
    assert found[1] > 1.0
    assert found[-1] == 1.0, "what was wrong twice is not foreseen any more"

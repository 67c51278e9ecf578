"""Samples that stay in memory: a fixed part, never replaced, given back when asked for."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo.errors import DataError
from terrazzo.feed.arbiter import LEAST_RESERVE_BYTES, Memory, room_bytes
from terrazzo.feed.arena import Arena
from terrazzo.feed.form import DECODED, ENCODED, freeze, thaw
from terrazzo.feed.held import chance_of, choose_form
from terrazzo.feed.rota import arranged
from terrazzo.feed.seeded import seeded_loader
from terrazzo.feed.source import Options, Source
from terrazzo.feed.twosteps import in_two_steps
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Files, flat

MIB = 1 << 20


class Augmented(Files):
    """Every sample is another in every epoch, so that only its file can be held."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, label = super().__getitem__(index)
        return x + torch.randint(9, x.shape, dtype=torch.uint8) + random.randrange(3), label


class Large(Files):
    """Decoding makes more of a file than it was."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, label = super().__getitem__(index)
        return x.repeat(3000), label


def source_of(data: Any, run: Path, *, cache_bytes: int, workers: int = 1) -> Source:
    loader = seeded_loader(
        data, seed=3, batch_size=4, shuffle=True, sampler=None, collate=None, drop_last=False
    )
    recorder = Recorder(run, 0)
    options = Options(workers=workers, cache_bytes=cache_bytes, seed=3)
    return Source(loader, options, recorder=lambda: recorder, trains=lambda: True)


def read_bytes(run: Path) -> list[float]:
    """Bytes read from storage in each epoch."""
    found = [dict(event.values) for event in read_events(run) if event.name == "epoch"]
    return [row["read_bytes"] for row in found]


def epochs(source: Source, count: int) -> list[Any]:
    found = [flat(source) for _ in range(count)]
    recorder = source.recorder()
    assert recorder is not None
    recorder.flush()
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_each_epoch_reads_what_is_not_held(tmp_path: Path, workers: int) -> None:
    data = Augmented(tmp_path / "data", count=64)
    total = data.total_bytes
    source = source_of(data, tmp_path / "run", cache_bytes=total // 2, workers=workers)
    found = epochs(source, 6)
    assert source.held is not None
    assert source.held.form == ENCODED
    held = sum(data.path(index).stat().st_size for index in source.held.places)
    assert 0.4 * total < held <= total // 2
    for read in read_bytes(tmp_path / "run")[3:]:
        assert read == pytest.approx(total - held, rel=0.01)
    plain = epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 6)
    assert found == plain, "what is held changes no sample"


class Uneven(Augmented):
    """Files of different sizes; those that come first are a fifth larger than the others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, count=250)
        draw, first = random.Random(5), set(arranged(self.count, 3, 0).tolist()[:16])
        for index in range(self.count):
            size = draw.randrange(20_000, 60_000) * (6 if index in first else 5) // 5
            self.path(index).write_bytes(bytes([index]) * size)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_from_the_second_epoch_on_all_that_has_room_is_held(tmp_path: Path, share: float) -> None:
    data = Uneven(tmp_path / "data")
    total = data.total_bytes
    source = source_of(data, tmp_path / "run", cache_bytes=int(share * total))
    epochs(source, 4)
    for read in read_bytes(tmp_path / "run")[1:]:
        assert read / total == pytest.approx(1 - share, abs=0.01)


def test_decoded_samples_are_held_where_that_saves_more(tmp_path: Path) -> None:
    data = Files(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB)
    found = epochs(source, 3)
    assert source.held is not None
    assert source.held.form == DECODED
    assert len(source.held.places) == len(data)
    assert read_bytes(tmp_path / "run")[2] == 0
    assert found[2] == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 3)[2]


def test_both_forms_are_weighed(tmp_path: Path) -> None:
    data = Large(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=2 * data.total_bytes)
    epochs(source, 2)
    assert source.held is not None
    sizes = source.held.means()
    assert sizes[DECODED][0] > 20 * sizes[ENCODED][0]
    assert sizes[ENCODED][0] == pytest.approx(data.total_bytes / len(data), rel=0.2)


def test_the_form_that_saves_most_of_an_epoch_is_chosen() -> None:
    sizes = {ENCODED: (100.0, 0.010), DECODED: (1000.0, 0.030)}
    assert choose_form(sizes, samples=100, room_bytes=100_000) == DECODED, "all of it fits"
    assert choose_form(sizes, samples=100, room_bytes=10_000) == ENCODED, "ten times as many fit"
    assert choose_form({ENCODED: (100.0, 0.0)}, samples=9, room_bytes=9999) is None
    assert choose_form({}, samples=9, room_bytes=9999) is None


class Steps(Augmented):
    """Reads in a way that nobody can watch, and says what that is."""

    def fetch(self, index: int) -> bytes:
        file = os.open(self.path(index), os.O_RDONLY)
        data = os.read(file, 1 << 20)
        os.close(file)
        return data

    def decode(self, data: bytes) -> tuple[Tensor, int]:
        x = torch.frombuffer(bytearray(data[:64]), dtype=torch.uint8)
        return x + torch.randint(9, x.shape, dtype=torch.uint8), data[0]

    @in_two_steps
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.decode(self.fetch(index))


class Flipped(Steps):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, label = super().__getitem__(index)
        return x.flip(0), label


def test_what_a_data_set_fetches_itself_can_be_held(tmp_path: Path) -> None:
    data = Steps(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB)
    found = epochs(source, 3)
    assert source.held is not None
    assert len(source.held.places) == len(data)
    assert read_bytes(tmp_path / "run")[0] >= data.total_bytes
    assert read_bytes(tmp_path / "run")[2] == 0
    assert found == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 3)


def test_a_subclass_with_a_way_of_its_own_is_not_taken_apart(tmp_path: Path) -> None:
    data = Flipped(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB)
    found = epochs(source, 3)
    assert source.held is not None
    assert not source.held.places
    assert found == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 3)


def test_a_sample_larger_than_the_cache_is_read_each_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Augmented(tmp_path / "data", size=8192)
    source = source_of(data, tmp_path / "run", cache_bytes=4096)
    epochs(source, 3)
    assert source.held is not None
    assert not source.held.places
    assert read_bytes(tmp_path / "run") == [data.total_bytes] * 3
    told = [line for line in capfd.readouterr().err.splitlines() if "no samples are held" in line]
    assert len(told) == 1, "once, and not in each epoch"
    assert re.search(r"one takes 8\.\d KiB, and there is room for 4\.0 KiB", told[0]), told


def test_a_held_file_that_changes_is_told(tmp_path: Path) -> None:
    data = Augmented(tmp_path / "data")
    source = source_of(data, tmp_path / "run", cache_bytes=MIB)
    epochs(source, 2)
    os.utime(data.path(5), ns=(1, 1))
    with pytest.raises(DataError, match=r"005\.bin has changed since it was read first") as caught:
        list(source)
    text = str(caught.value)
    assert text.startswith("sample 5 of Augmented: ")
    assert text.count(".bin") == 1, "no other file is blamed"
    assert "Repair" not in text, "one remedy, and not two"


def test_memory_is_given_back_and_nothing_changes(tmp_path: Path) -> None:
    data = Augmented(tmp_path / "data", count=64)
    source = source_of(data, tmp_path / "run", cache_bytes=MIB)
    found = epochs(source, 3)
    held = source.held
    assert held is not None
    before, taken = held.held_bytes, blocks(held.arena)
    held.give_back(before // 2)
    assert held.held_bytes <= before // 2
    assert blocks(held.arena) <= taken // 2 + 8192
    assert 0 < len(held.places) < 64
    found += epochs(source, 2)
    assert found == epochs(source_of(data, tmp_path / "plain", cache_bytes=0, workers=0), 5)


# ---- the arena ------------------------------------------------------------------------------


def blocks(arena: Arena) -> int:
    """Bytes of memory that it really takes."""
    return os.fstat(arena._file).st_blocks * 512


def test_an_arena_takes_memory_only_as_it_fills() -> None:
    arena = Arena(64 * MIB)
    assert blocks(arena) < MIB
    places = [arena.put(bytes([number]) * 100_000) for number in range(20)]
    assert 2_000_000 <= blocks(arena) < 3 * MIB
    for number, place in enumerate(places):
        assert place is not None
        assert arena.get(place, 100_000) == bytes([number]) * 100_000
    arena.give_back(0)
    assert blocks(arena) <= 8192
    assert [arena.get(place or 0, 100_000) for place in places] == [None] * 20
    assert arena.put(b"x") is None
    arena.allow(MIB)
    place = arena.put(b"x")
    assert place is not None
    assert arena.get(place, 1) == b"x"
    arena.close()


def test_a_full_arena_refuses() -> None:
    arena = Arena(10_000)
    arena.give_back(8192)
    assert arena.put(bytes(8193)) is None
    assert arena.put(bytes(8000)) is not None
    assert arena.put(bytes(8000)) is None
    arena.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_put_in_at_once_and_never_overlap() -> None:
    arena = Arena(MIB)
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            places = [arena.put(bytes([number]) * 1000) for _ in range(50)]
            good = all(arena.get(place or 0, 1000) == bytes([number]) * 1000 for place in places)
            os._exit(0 if good else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert arena.used_bytes == 4 * 50 * 1024
    arena.close()


# ---- smaller pieces -------------------------------------------------------------------------


def test_samples_survive_freezing() -> None:
    sample = {
        "x": torch.arange(6).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 4), "text": ["a", 1, None], "strided": torch.arange(8)[::2],
        "number": torch.tensor(2.5),
    }  # fmt: skip
    found = thaw(freeze(sample))
    assert found.keys() == sample.keys()
    for name, right in sample.items():
        if isinstance(right, Tensor):
            assert found[name].dtype == right.dtype, name
            assert torch.equal(found[name], right), name
            found[name].zero_()  # it is the sample's own memory
        else:
            assert found[name] == right


def test_the_share_that_is_held_follows_the_seed() -> None:
    chosen = [{i for i in range(10_000) if chance_of(seed, i) < 0.3} for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == pytest.approx(3000, rel=0.05)
    assert len(chosen[0] & chosen[2]) == pytest.approx(900, rel=0.15)


def test_the_model_comes_first() -> None:
    memory = Memory(
        ceiling_bytes=1000 * MIB, available_bytes=500 * MIB,
        resident_bytes=200 * MIB, peak_bytes=300 * MIB,
    )  # fmt: skip
    free = 500 * MIB - LEAST_RESERVE_BYTES - 100 * MIB
    assert room_bytes(memory, held_bytes=0, asked_bytes=None) == free // 2
    assert room_bytes(memory, held_bytes=0, asked_bytes=10 * MIB) == 10 * MIB
    assert room_bytes(memory, held_bytes=free, asked_bytes=None) == free, "it does not creep"
    short = Memory(1000 * MIB, 120 * MIB, 200 * MIB, 300 * MIB)
    lacks = LEAST_RESERVE_BYTES + 100 * MIB - 120 * MIB
    assert room_bytes(short, held_bytes=200 * MIB, asked_bytes=None) == 200 * MIB - lacks
    assert room_bytes(short, held_bytes=10 * MIB, asked_bytes=10 * MIB) == 0
    here = Memory.here()
    assert 0 < here.resident_bytes <= here.peak_bytes <= here.ceiling_bytes
    assert here.available_bytes > 0

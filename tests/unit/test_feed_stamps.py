"""A file that changes while training goes on is told, whoever reads it, and held or not."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from terrazzo.errors import DataError
from terrazzo.feed.shards import ShardSet
from terrazzo.feed.source import Options, Source
from terrazzo.feed.stamps import LEAST, Stamps
from terrazzo.feed.stock import Stock
from terrazzo.feed.tuner import Limits, Settings, Tuner

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Files, flat
from test_feed_cache import MIB, Augmented

CHANGED = r"005\.bin has changed since it was read first"


class AtOnce(Files):
    """Gives all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [self[index] for index in indices]


class InOrder(IterableDataset[Any]):
    """A stream of files."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        yield from (self.files[index] for index in range(len(self.files)))


class Words(Files):
    """Reads as text, by names that hang on where the script is."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with open(os.path.relpath(self.path(index)), encoding="latin-1") as file:  # noqa: PTH123
            return torch.tensor(len(file.read())), index


class Notes(Files):
    """Writes down how often each sample was read, in a file of its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        note = self.path(index).with_suffix(".txt")
        count = len(note.read_text()) if note.exists() else 0
        note.write_text("x" * (count + 1))
        return torch.tensor(count), index


class Counting(Files):
    """Changes itself as it is read."""

    count_read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.count_read += 1
        return super().__getitem__(index)


def change(path: Path) -> None:
    """Other bytes in the same number, a moment later."""
    data = path.read_bytes()
    before = path.stat().st_mtime_ns
    path.write_bytes(data[:1] + bytes([data[1] ^ 1]) + data[2:])
    os.utime(path, ns=(before + 1, before + 1))


def twice(source: Source) -> None:
    """Batches that were made ahead of the first time may be from before."""
    for _ in range(2):
        list(source)


WAYS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (Files, {}, {"workers": 0}),
    (Files, {}, {"workers": 2}),
    (Files, {}, {}),
    (Files, {"num_workers": 2}, {}),
    (Files, {"num_workers": 2}, {"workers": 2}),
    (Augmented, {}, {"workers": 0}),
    (AtOnce, {}, {"workers": 1}),
    (Words, {}, {"workers": 1}),
    (Words, {}, {"workers": 0}),
    (Counting, {}, {"workers": 0}),
    (InOrder, {}, {}),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache_bytes", [0, MIB])
def test_a_file_that_changes_is_told(tmp_path: Path, way: Any, cache_bytes: int) -> None:
    kind, of_loader, options = way
    files = kind(tmp_path / "data") if kind is not InOrder else Files(tmp_path / "data")
    data = InOrder(files) if kind is InOrder else files
    source = Source(DataLoader(data, 4, **of_loader), Options(cache_bytes=cache_bytes, **options))
    twice(source)
    change(files.path(5))
    with pytest.raises(DataError, match=CHANGED) as caught:
        twice(source)
    text = str(caught.value)
    assert text.count(".bin") == 1, "no other file is blamed"
    assert "could not be read" not in text, "one remedy, and not two"


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_files_are_skipped_and_counted_if_asked_for(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Files(tmp_path / "data")
    source = Source(DataLoader(data, 4), Options(workers=workers, cache_bytes=0, skip=True))
    list(source)
    list(source)
    for index in (5, 6):
        change(data.path(index))
    list(source)
    rows = [row for _, labels in flat(source) for row in labels]
    assert rows == [index for index in range(24) if index not in (5, 6)]
    assert "005.bin has changed" in capfd.readouterr().err


@pytest.mark.parametrize("cache_bytes", [0, MIB])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Files, Augmented])
def test_a_script_may_change_files_if_it_changes_the_data_set(
    tmp_path: Path, kind: Any, workers: int, cache_bytes: int
) -> None:
    data = kind(tmp_path / "data")
    source = Source(DataLoader(data, 4), Options(workers=workers, cache_bytes=cache_bytes, seed=3))
    for version in range(1, 4):
        data.version = version
        for index in range(len(data)):
            change(data.path(index))
        again = Source(DataLoader(data, 4), Options(workers=0, cache_bytes=0, seed=3))
        again.epoch = source.epoch
        assert flat(source) == flat(again), "the bytes that are there now"
    change(data.path(5))
    with pytest.raises(DataError, match=CHANGED):
        twice(source)


def test_what_a_data_set_writes_itself_may_change(tmp_path: Path) -> None:
    source = Source(DataLoader(Notes(tmp_path / "data"), 4), Options(workers=0))
    counts = [[row for rows, _ in flat(source) for row in rows] for _ in range(3)]
    assert counts == [[0] * 24, [1] * 24, [2] * 24]


def test_a_new_loader_for_each_epoch_is_no_excuse(tmp_path: Path) -> None:
    data, stock = Files(tmp_path / "data"), Stock()
    list(Source(DataLoader(data, 4), Options(workers=0), stock=stock))
    change(data.path(5))
    with pytest.raises(DataError, match=CHANGED):
        list(Source(DataLoader(data, 4), Options(workers=0), stock=stock))
    list(Source(DataLoader(Files(tmp_path / "data"), 4), Options(workers=0), stock=stock))


def test_workers_and_the_training_process_tell_each_other(tmp_path: Path) -> None:
    data = Files(tmp_path / "data")
    source = Source(DataLoader(data, 4), Options(cache_bytes=0))
    source.tuner = Tuner(Settings(2, 4), Limits(2, 4), fixed=True)
    list(source)
    source.tuner = Tuner(Settings(), Limits(0, 0), fixed=True)
    change(data.path(5))
    with pytest.raises(DataError, match=CHANGED):
        twice(source)


def test_a_full_table_forgets_nobody_and_blames_nobody(tmp_path: Path) -> None:
    stamps, facts = Stamps(1), tmp_path.joinpath("one")
    facts.write_bytes(b"1")
    before = facts.stat()
    facts.write_bytes(b"22")
    after = facts.stat()
    names = [f"/data/{number}" for number in range(2 * LEAST)]
    noted = [name for name in names if stamps.note(name, before)]
    assert 0.95 * LEAST < len(noted) <= LEAST
    told = 0
    for name in names:
        try:
            stamps.note(name, after)
        except DataError:
            told += 1
    assert told == len(noted)


def test_what_is_no_data_may_change(tmp_path: Path) -> None:
    stamps = Stamps()
    for path in (Path("/proc/self/stat"), Path("/dev/null")):
        assert not stamps.note(str(path), path.stat())
    code = tmp_path / "code.py"
    code.write_text("")
    assert not stamps.note(str(code), code.stat())


def test_a_tar_without_an_index_that_changes_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.add(tmp_path / "a.txt", "a.txt")
    data = ShardSet(tmp_path)
    assert data[0]["txt"] == b"one"
    change(tmp_path / "0.tar")
    with pytest.raises(DataError, match=r"0\.tar has changed since .* Make a new ShardSet"):
        data[0]

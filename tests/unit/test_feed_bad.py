"""Bad input: an error that names it, or a counted skip; order and position never just change."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from terrazzo.errors import DataError, UsageError
from terrazzo.feed.batch import describe, rebuild
from terrazzo.feed.source import Options, Source
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from pictures import SIZE, Deadly, Files, Numbers, flat

WORKERS = [0, 2]


def of(dataset: Any, workers: int, **options: Any) -> Source:
    return Source(DataLoader(dataset, batch_size=4), Options(workers=workers, **options))


def until_it_fails(source: Source) -> tuple[list[int], DataError]:
    """The samples that came, and why there were no more."""
    found: list[int] = []
    try:
        for batch in source:
            found += batch[1].tolist()
    except DataError as error:
        return found, error
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_missing_file_is_named(tmp_path: Path, workers: int) -> None:
    data = Files(tmp_path / "data")
    data.path(9).unlink()
    found, error = until_it_fails(of(data, workers))
    for word in ("sample 9 of Files", "009.bin", "FileNotFoundError", 'bad="skip"'):
        assert word in str(error)
    assert found == list(range(8)), "what comes before it is right"


@pytest.mark.parametrize("workers", WORKERS)
def test_bad_samples_are_left_out_and_counted_if_asked_for(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = Files(tmp_path / "data")
    data.path(9).unlink()
    data.path(10).write_bytes(b"\0not what it was")
    recorder = Recorder(tmp_path / "run", 0)
    source = Source(
        DataLoader(data, batch_size=4),
        Options(workers=workers, skip=True),
        recorder=lambda: recorder,
    )
    numbers = [batch[1].tolist() for batch in source]
    right = [list(range(at, at + 4)) for at in range(0, 24, 4)]
    right[2] = [8, 11]
    assert numbers == right
    told = capfd.readouterr().err
    assert "009.bin" in told
    assert "010.bin" in told
    recorder.flush()
    ends = [dict(e.values) for e in read_events(tmp_path / "run") if e.name == "epoch"]
    assert [end["skipped"] for end in ends] == [2.0]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_of_which_nothing_is_left_is_an_error(tmp_path: Path, workers: int) -> None:
    data = Files(tmp_path / "data")
    for index in range(4, 8):
        data.path(index).unlink()
    with pytest.raises(DataError, match=r"no sample of the batch \[4, 5, 6, 7\]"):
        list(of(data, workers, skip=True))


class Uneven(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 + (index == 6)), index


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_that_do_not_fit_together_are_named(workers: int) -> None:
    words = r"samples \[4, 5, 6, 7\] could not be put into a batch: sample 6 has 3, most have 2"
    with pytest.raises(DataError, match=words):
        list(of(Uneven(), workers))


def test_a_sample_that_ends_workers_is_named() -> None:
    source = of(Deadly(6), 2)
    found, error = until_it_fails(source)
    assert "ended itself with exit status 3 at sample 6 of Deadly, like 1 before" in str(error)
    assert "memory" not in str(error)
    assert found == [0, 1, 2, 3]
    assert source.pool is not None
    assert source.pool.died == 2


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost() -> None:
    source = of(Numbers(), 2)
    found = []
    for number, batch in enumerate(source):
        found += flat([batch])
        if number in (1, 4):
            assert source.pool is not None
            os.kill(source.pool.processes[0], signal.SIGKILL)
    assert found == flat(DataLoader(Numbers(), batch_size=4))
    assert source.pool is not None
    assert 1 <= source.pool.died <= 2, "one that had nothing to do may not be missed yet"


class Unpicklable(Numbers):
    def __getitem__(self, index: int) -> Any:
        return lambda: index


def test_what_cannot_leave_a_worker_is_told() -> None:
    loader = DataLoader(Unpicklable(), batch_size=4, collate_fn=lambda rows: rows)
    with pytest.raises(DataError, match="could not be handed over"):
        list(Source(loader, Options(workers=1)))


def test_workers_end_with_their_source() -> None:
    source = of(Numbers(), 2)
    next(iter(source))
    assert source.pool is not None
    processes = source.pool.processes
    assert len(processes) == 2
    del source
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_killed_leaves_no_workers(tmp_path: Path) -> None:
    told, mine = os.pipe()
    child = os.fork()
    if child == 0:  # trains until it is killed
        source = of(Numbers(), 2)
        next(iter(source))
        assert source.pool is not None
        os.write(mine, b" ".join(str(pid).encode() for pid in source.pool.processes))
        signal.pause()
    os.close(mine)
    workers = [int(word) for word in os.read(told, 100).split()]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.read(told, 1) == b"", "the last who could write is gone"
    os.close(told)
    assert len(workers) == 2


def test_a_loop_that_is_left_leaves_the_source_usable() -> None:
    source = of(Numbers(), 2)
    for _ in source:
        break
    assert sum(len(batch[1]) for batch in source) == SIZE


def test_a_batch_never_names_code_that_others_would_import() -> None:
    x = torch.zeros(2)
    named = defaultdict(list, x=x)
    with pytest.raises(UsageError, match="plain dicts"):
        describe(named)
    header, tensors = describe({"x": x})
    assert rebuild(header, tensors, None)["x"] is x
    header["tree"] = pytree.treespec_dumps(pytree.tree_structure(named))
    with pytest.raises(UsageError, match="plain dicts"):
        rebuild(header, tensors, None)


class Labelled(Dataset[Any]):
    """A picture and its label, in a file of text; what is wrong with a file, nobody says."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        for number in range(8):
            (folder / f"{number}.bin").write_bytes(bytes([number] * 12))
            (folder / f"{number}.json").write_text(json.dumps({"label": number}))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = (self.folder / f"{index}.bin").read_bytes()
        if len(data) < 12:
            raise ValueError("cut short")
        with (self.folder / f"{index}.json").open() as file:
            return torch.tensor(list(data)), int(json.load(file)["label"])


class AtOnce(Labelled):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class InOrder(IterableDataset[Any]):
    def __init__(self, data: Labelled) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Labelled, AtOnce])
@pytest.mark.parametrize("name", ["5.bin", "5.json"])
def test_a_file_is_named_that_the_error_does_not_name(
    tmp_path: Path, workers: int, kind: type[Labelled], name: str
) -> None:
    data = kind(tmp_path / "data")
    (data.folder / name).write_bytes(b"?")
    found, error = until_it_fails(of(data, workers))
    assert f"data/{name})" in str(error)
    assert "sample" in str(error)
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_the_loader_makes_itself_fail_in_words(tmp_path: Path, workers: int) -> None:
    data = Labelled(tmp_path / "data")
    (data.folder / "5.bin").write_bytes(b"?")
    loader = DataLoader(InOrder(data), batch_size=4, num_workers=workers)
    found, error = until_it_fails(Source(loader, Options(skip=True)))
    assert found == [0, 1, 2, 3]
    assert "batch 1 of InOrder" in str(error)
    assert "ValueError: cut short" in str(error)
    assert ("5.bin" in str(error)) == (workers == 0), "who else opens files is not seen"
    assert 'bad="skip" is not possible here: the data set is iterable' in str(error)
    assert isinstance(error.__cause__, ValueError)

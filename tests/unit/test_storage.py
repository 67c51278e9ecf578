"""Storage: measured within its bounds, kept as a record, refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.measure.medium import medium_of
from terrazzo.measure.storage import measure_storage
from terrazzo.records.storage import ADVISED, DIRECT, MEMORY, Reads, Storage

KIB = 1 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"{number}.jpg").write_bytes(os.urandom(9 * KIB))
    (tmp_path / "large.bin").write_bytes(os.urandom(9 << 20))
    return tmp_path


def test_a_folder_is_measured_within_its_bounds(folder: Path) -> None:
    heard: list[tuple[str, float]] = []
    found = measure_storage(
        folder,
        budget_s=0.5,
        most_bytes=4 << 20,
        tell=lambda what, share: heard.append((what, share)),
    )
    assert found.method in (DIRECT, ADVISED, MEMORY)
    # The last read of each of eight parts, by each reader, may go beyond its share.
    assert 0 < found.read_bytes < (4 << 20) + 4 * (4 << 20)
    assert found.sequential_bytes_per_s > 0
    assert {(row.size_bytes, row.readers) for row in found.random} == {
        (size * KIB, readers) for size in (4, 64, 512) for readers in (1, 4, 8)
    }
    assert all(row.count >= row.readers and row.each_s > 0 for row in found.random)
    assert found.files is not None
    assert found.files.size_bytes == 9 * KIB, "the large file is no small one"
    shares = [share for _, share in heard]
    assert shares == sorted(shares), "progress goes forward"
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_a_folder_without_files_gets_a_scratch_file_that_goes_away(tmp_path: Path) -> None:
    found = measure_storage(tmp_path, budget_s=0.3, most_bytes=1 << 20)
    assert found.files is None
    assert found.sequential_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_record_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    found = measure_storage(folder, budget_s=0.2, most_bytes=1 << 20)
    found.save(tmp_path / "card.json")
    assert Storage.load(tmp_path / "card.json") == found
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(UsageError, match=r"card.json: this is no storage record"):
        Storage.load(tmp_path / "card.json")


def test_reads_between_and_beyond_measured_sizes() -> None:
    rows = (
        Reads(4 * KIB, 1, 1e-3, 9),
        Reads(64 * KIB, 1, 4e-3, 9),
        Reads(4 * KIB, 4, 2e-3, 9),
        Reads(64 * KIB, 4, 16e-3, 9),
    )
    card = Storage("/x", "a card", DIRECT, 2e7, rows, None, 0, 0.0, 0.0)
    assert card.read_s(1) == 1e-3, "no read is faster than the smallest one measured"
    assert card.read_s(34 * KIB) == pytest.approx(2.5e-3)
    assert card.read_s(124 * KIB) == pytest.approx(7e-3)
    assert card.read_s(64 * KIB, readers=4) == pytest.approx(16e-3)


def test_the_medium_is_named() -> None:
    assert medium_of(Path("/proc")).file_system == "proc"
    if Path("/dev/shm").is_dir():
        assert medium_of(Path("/dev/shm")).is_memory


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "storage", str(folder), "--seconds", "0.3", "--most", "2MiB"]
    assert main([*arguments, "--save", str(folder / "figures.json")]) == 0
    out = capsys.readouterr().out
    assert "in one piece" in out
    assert "64.0 KiB at random, 4 readers" in out
    assert "whole files, 9.0 KiB each" in out
    assert Storage.load(folder / "figures.json").path == str(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/at/all"], "there is no file or folder /nowhere/at/all"),
        ([".", "--seconds", "0"], "--seconds 0 must be above 0"),
        ([".", "--most", "much"], "'much' is no amount of memory"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "storage", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1

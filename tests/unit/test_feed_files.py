"""Files as samples open them: whole ones are theirs, and what many open is nobody's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from terrazzo.errors import DataError
from terrazzo.feed.files import SMALL_BYTES, Files, check, watched

LARGE = 3 * SMALL_BYTES


def path_of(folder: Path, name: str, size: int) -> Path:
    path = folder / name
    path.write_bytes(bytes(range(256)) * (size // 256))
    return path


def test_an_archive_is_not_read_whole_for_each_sample(tmp_path: Path) -> None:
    path, files = path_of(tmp_path, "all.bin", LARGE), Files()
    with watched(files):
        for sample in range(8):
            files.begin(sample)
            with path.open("rb") as file:
                file.seek(1000 * sample)
                assert file.read(100) == (bytes(range(256)) * 100)[1000 * sample :][:100]
            assert files.whole is None
    assert files.read_bytes < SMALL_BYTES


def test_a_small_file_that_many_open_belongs_to_none(tmp_path: Path) -> None:
    table, files = path_of(tmp_path, "labels.bin", 1024), Files()
    own = [path_of(tmp_path, f"{sample}.bin", 2048) for sample in range(3)]
    found = []
    with watched(files):
        for epoch in range(2):
            for sample, path in enumerate(own):
                files.begin(sample)
                assert len(table.read_bytes()) == 1024
                assert len(path.read_bytes()) == 2048
                found.append([Path(name).name for name, _, _ in files.whole])
            assert len(files.stamps) == 2, f"both were read in epoch {epoch}"
    assert found[0] == ["labels.bin", "0.bin"], "nobody can know yet"
    assert found[1:3] == [["1.bin"], ["2.bin"]]


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_large_file_that_is_read_whole_can_be_held(tmp_path: Path, pieces: int) -> None:
    path, files = path_of(tmp_path, "one.bin", LARGE), Files()
    right = path.read_bytes()
    with watched(files):
        files.begin(0)
        with path.open("rb") as file:
            assert file.read(4) == right[:4]
            file.seek(0)
            size = -(-LARGE // pieces)
            assert b"".join(file.read(size) for _ in range(pieces)) == right
        assert [data for _, _, data in files.whole] == [right]
        files.begin(0, files.whole)
        assert path.read_bytes() == right
        assert files.opened == [], "not from storage again"


def test_libraries_read_large_files_as_ever(tmp_path: Path) -> None:
    path, files = tmp_path / "one.npy", Files()
    right = np.arange(1 << 19, dtype=np.int64)
    np.save(path, right)
    with watched(files):
        files.begin(0)
        assert np.array_equal(np.load(path), right)
        with path.open("rb", buffering=0) as raw:
            assert raw.read(6) == b"\x93NUMPY"
            assert os.fstat(raw.fileno()).st_size == path.stat().st_size


def test_files_that_other_threads_open_are_not_of_the_sample(tmp_path: Path) -> None:
    mine, other = path_of(tmp_path, "mine", 256), path_of(tmp_path, "other", 256)
    files = Files()
    with watched(files):
        files.begin(0)
        thread = threading.Thread(target=other.read_bytes)
        thread.start()
        thread.join()
        mine.read_bytes()
        assert [Path(name).name for name, _, _ in files.opened] == ["mine"]


def test_a_file_of_which_a_part_was_read_is_still_watched(tmp_path: Path) -> None:
    path, files = path_of(tmp_path, "all.bin", LARGE), Files()
    with watched(files):
        files.begin(0)
        with path.open("rb") as file:
            file.read(10)
    check(files.stamps)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"all\.bin has changed"):
        check(files.stamps)

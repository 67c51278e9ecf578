"""Packed shards: whole or absent, the same bytes as the files, and refused when they are not."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from terrazzo.cli.main import main
from terrazzo.errors import DataError, UsageError
from terrazzo.feed.packing import pack, samples_of, split_name
from terrazzo.feed.shards import ShardSet

SHARD = 1 << 16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = random.Random(3)
    for kind in ("cats", "dogs"):
        (tmp_path / "source" / kind).mkdir(parents=True)
        for number in range(12):
            path = tmp_path / "source" / kind / f"{number:03}"
            path.with_suffix(".jpg").write_bytes(draw.randbytes(draw.randrange(1, 15_000)))
            path.with_suffix(".seg.png").write_bytes(draw.randbytes(700))
    (tmp_path / "source" / ".hidden").write_text("not data")
    return tmp_path / "source"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestSamples:
    @pytest.mark.parametrize(
        ("name", "key", "field"),
        [
            ("017.jpg", "017", "jpg"),
            ("a.b/017.seg.png", "a.b/017", "seg.png"),
            ("README", "README", ""),
            ("a/.jpg", "", "jpg"),
        ],
    )
    def test_names(self, name: str, key: str, field: str) -> None:
        assert split_name(name) == (key, field)

    def test_links_to_folders_are_followed_but_not_in_circles(
        self, source: Path, tmp_path: Path
    ) -> None:
        linked = tmp_path / "linked"
        linked.mkdir()
        for kind in ("cats", "dogs"):
            (linked / kind).symlink_to(source / kind)
        assert [one.key for one in samples_of(linked)] == [one.key for one in samples_of(source)]
        (source / "cats" / "again").symlink_to(source)
        with pytest.raises(DataError, match="again is a link to one that it lies in"):
            samples_of(source)

    def test_files_of_one_name_are_one_sample(self, source: Path) -> None:
        found = samples_of(source)
        assert len(found) == 24
        assert found[0].key == "cats/000"
        assert [field for field, _ in found[0].files] == ["jpg", "seg.png"]

    def test_files_of_one_name_in_two_folders_cannot_be_one_field(self, source: Path) -> None:
        with pytest.raises(DataError, match=r"cats/000.jpg and .*dogs/000.jpg would both be"):
            samples_of(source, by_name=True)

    def test_files_of_one_name_in_two_folders_are_joined(self, tmp_path: Path) -> None:
        for name in ("pictures/1.jpg", "masks/1.png", "labels.json"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"x")
        found = samples_of(tmp_path, by_name=True, only=("jpg", "png"))
        assert [(one.key, [f for f, _ in one.files]) for one in found] == [("1", ["jpg", "png"])]


class TestPacking:
    def test_shards_hold_the_files_and_the_source_stays(self, source: Path, tmp_path: Path) -> None:
        before = snapshot(source)
        found = pack(source, tmp_path / "shards", shard_bytes=SHARD)
        assert snapshot(source) == before
        assert len(found.shards.names) > 2
        read: dict[str, bytes] = {}
        for path in sorted((tmp_path / "shards").glob("*.tar")):
            assert path.stat().st_size <= SHARD + tarfile.RECORDSIZE
            with tarfile.open(path) as tar:  # as any reader of webdataset's form does
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None
                    read[member.name] = file.read()
        before.pop(".hidden")
        assert read == before
        assert list(read) == sorted(read), "the fields of a sample lie side by side"

    def test_the_same_files_give_the_same_bytes(self, source: Path, tmp_path: Path) -> None:
        for name in ("one", "two"):
            pack(source, tmp_path / name, shard_bytes=SHARD)
        assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")

    def test_stopped_and_given_again(self, source: Path, tmp_path: Path) -> None:
        target, heard = tmp_path / "shards", []

        def stop_later(done: int, total: int) -> None:
            heard.append(done)
            if done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pack(source, target, shard_bytes=SHARD, tell=stop_later)
        assert heard == sorted(heard)
        assert [path.name for path in target.iterdir() if path.name.startswith(".")] == []
        with pytest.raises(UsageError, match="was not finished: give the same"):
            ShardSet(target)
        left = {path.name: path.stat().st_mtime_ns for path in target.glob("*.tar")}
        assert left
        found = pack(source, target, shard_bytes=SHARD)
        assert found.kept == len(left)
        assert {name: (target / name).stat().st_mtime_ns for name in left} == left
        pack(source, tmp_path / "at once", shard_bytes=SHARD)
        assert snapshot(target) == snapshot(tmp_path / "at once")

    def test_a_damaged_shard_is_written_again(self, source: Path, tmp_path: Path) -> None:
        target = tmp_path / "shards"
        pack(source, target, shard_bytes=SHARD)
        whole = snapshot(target)
        flip(target / "shard-000001.tar", 3000)
        found = pack(source, target, shard_bytes=SHARD)
        assert found.kept == len(found.shards.names) - 1
        assert snapshot(target) == whole

    def test_a_file_that_grows_meanwhile_is_named(self, source: Path, tmp_path: Path) -> None:
        grown = source / "dogs" / "011.jpg"

        def grow(done: int, total: int) -> None:
            with grown.open("ab") as file:
                file.write(b"more")

        with pytest.raises(DataError, match=r"dogs/011.jpg has changed while it was packed"):
            pack(source, tmp_path / "shards", tell=grow)
        assert list((tmp_path / "shards").iterdir()) == []


def flip(path: Path, offset: int) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


class TestReading:
    @pytest.fixture
    def shards(self, source: Path, tmp_path: Path) -> Path:
        pack(source, tmp_path / "shards", shard_bytes=SHARD)
        return tmp_path / "shards"

    def test_any_order_with_workers(self, source: Path, shards: Path) -> None:
        found = ShardSet(shards, decode=lambda fields: (fields["__key__"], fields["jpg"]))
        loader = DataLoader(
            found,
            batch_size=None,
            shuffle=True,
            num_workers=1,
            generator=torch.Generator().manual_seed(1),
        )
        found[0]  # a file that is open here is opened again in each worker
        seen = dict(loader)
        assert seen == {
            str(path.relative_to(source))[:-4]: path.read_bytes() for path in source.rglob("*.jpg")
        }
        assert list(seen) != sorted(seen)

    def test_it_survives_pickling(self, shards: Path) -> None:
        found = ShardSet(shards)
        first = found[0]
        again = pickle.loads(pickle.dumps(found))
        found.close()
        assert again[0] == first

    def test_fields_that_lie_far_apart_are_read_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with tarfile.open(tmp_path / "all.tar", "w") as tar:
            for field, size in (("jpg", 50_000), ("json", 10)):
                for number in range(20):
                    data = tarfile.TarInfo(f"{number:03}.{field}")
                    data.size = size
                    tar.addfile(data, io.BytesIO(bytes([number]) * size))
        shards, read = ShardSet(tmp_path), []
        real = os.pread
        monkeypatch.setattr(os, "pread", lambda *a: (read.append(a[1]), real(*a))[1])
        for index in range(20):
            fields = shards[index]
            assert fields["jpg"] == bytes([index]) * 50_000
            assert fields["json"] == bytes([index]) * 10
        assert sum(read) < 3 * 20 * 50_010
        shards.close()

    def test_a_folder_of_plain_tars(self, source: Path, shards: Path, tmp_path: Path) -> None:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        for path in shards.glob("*.tar"):
            shutil.copy(path, foreign / path.name)
        ours, theirs = ShardSet(shards), ShardSet(foreign)
        assert ours.keys == theirs.keys
        assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(ours))]

    def test_a_flipped_bit_is_found_and_named(self, shards: Path) -> None:
        found = ShardSet(shards)
        flip(shards / "shard-000000.tar", 600)
        with pytest.raises(DataError, match=r"shard-000000.tar: field jpg of sample cats/000 is"):
            found[0]

    def test_a_shard_that_was_cut_short(self, shards: Path) -> None:
        path = shards / "shard-000001.tar"
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(DataError, match=r"shard-000001.tar has 5000 bytes, its index says"):
            ShardSet(shards)
        for sidecar in shards.glob("*.json"):
            sidecar.unlink()
        with pytest.raises(DataError, match=r"shard-000001.tar is no whole tar file"):
            ShardSet(shards)

    def test_noise_is_no_shard(self, tmp_path: Path) -> None:
        (tmp_path / "x.tar").write_bytes(random.Random(1).randbytes(4096))
        with pytest.raises(DataError, match=r"x.tar is no whole tar file"):
            ShardSet(tmp_path)


class TestRefused:
    def said(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
        assert main(["data", "pack", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    def test_sources(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target, empty = tmp_path / "shards", tmp_path / "empty"
        assert "is not there" in self.said(capsys, tmp_path / "none", target)
        empty.mkdir()
        assert "holds no files" in self.said(capsys, empty, target)
        (empty / "README").write_text("x")
        assert "README has no extension" in self.said(capsys, empty, target)
        assert "lies inside source" in self.said(capsys, empty, empty / "shards")
        (empty / "README").unlink()
        (empty / "1.jpg").symlink_to(empty / "gone.jpg")
        assert "1.jpg cannot be read: No such file" in self.said(capsys, empty, target)
        assert not target.exists()

    def test_targets(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "thesis.txt").write_text("x")
        assert "holds thesis.txt" in self.said(capsys, source, tmp_path / "used")
        assert main(["data", "pack", str(source), str(tmp_path / "shards")]) == 0
        assert "all checked by hash" in capsys.readouterr().out
        (source / "cats" / "000.jpg").write_bytes(b"another")
        line = self.said(capsys, source, tmp_path / "shards")
        assert "holds other files than shard-000000" in line
        assert "64KiB or more" in self.said(capsys, source, tmp_path / "x", "--shard-size", "9")


class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        """Two hundred kibibytes."""
        place = tmp_path / "disk"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a full disk was NOT tested: this needs root and a mount")
        yield place
        subprocess.run(["umount", str(place)], check=True)

    def test_it_is_said_before_anything_is_written(self, source: Path, small_disk: Path) -> None:
        (small_disk / "other").write_bytes(bytes(100_000))
        target = small_disk / "shards"
        with pytest.raises(DataError, match=r"KiB free, these shards take \d+ KiB: make room"):
            pack(source, target, shard_bytes=SHARD)
        assert list(target.iterdir()) == []

    def test_it_fills_up_meanwhile(self, tmp_path: Path, small_disk: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        for number in range(8):
            (source / f"{number}.bin").write_bytes(bytes([number]) * 14_000)
        target, hog = small_disk / "shards", small_disk / "hog"

        def fill(done: int, total: int) -> None:
            if done > 4 * 14_848:  # in the middle of the second shard
                hog.write_bytes(bytes(shutil.disk_usage(small_disk).free))

        with pytest.raises(DataError, match="is full: 0 B free, the next shard takes"):
            pack(source, target, shard_bytes=SHARD, tell=fill)
        names = sorted(path.name for path in target.iterdir())
        assert names == ["shard-000000.json", "shard-000000.tar"]
        hog.unlink()
        assert pack(source, target, shard_bytes=SHARD).kept == 1
        assert len(ShardSet(target)) == 8

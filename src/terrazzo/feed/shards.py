"""Packed shards as a map-style data set: any sampler works, and a sample is one read."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from terrazzo.errors import DataError, UsageError
from terrazzo.feed.packing import split_name
from terrazzo.feed.stamps import changed
from terrazzo.feed.twosteps import in_two_steps
from terrazzo.records.shards import MANIFEST, Member, ShardIndex, Shards
from terrazzo.records.units import count_text

KEY = "__key__"
GAP_BYTES = 64 << 10
"""So much between fields is rather read than skipped."""
Fields = Mapping[str, Any]
"""Bytes by field, and the sample's key under ``__key__``: as webdataset gives them."""


class ShardSet(Dataset[Any]):
    """``ShardSet("shards", decode)``: sample ``i`` is ``decode({"jpg": bytes, ...})``.

    ``folder`` is one that ``terrazzo data pack`` wrote, or any folder of tar files in webdataset's
    form; those have no index, so their headers are read once when the set is opened. Bytes are
    held against the index's checksum each time they are read.
    """

    def __init__(self, folder: Path | str, decode: Callable[[Fields], Any] | None = None) -> None:
        self.folder, self.decode_fields = Path(folder), decode
        self.shards: list[Path] = []
        self._stamps: list[tuple[int, int]] = []
        """Sizes and times of the shards when they were looked through."""
        self.keys: list[str] = []
        self._members: list[tuple[int, Mapping[str, Member]]] = []
        for path, samples in _opened(self.folder):
            self._members += [(len(self.shards), fields) for _, fields in samples]
            self.keys += [key for key, _ in samples]
            self.shards.append(path)
            self._stamps.append(_stamp(path.stat()))
        self._files: dict[int, int] = {}
        self._owner = os.getpid()

    def __len__(self) -> int:
        return len(self.keys)

    @in_two_steps
    def __getitem__(self, index: int) -> Any:
        return self.decode(self.fetch(index))

    def fetch(self, index: int) -> Fields:
        """The bytes of a sample: one read, whatever the number of its fields, unless more lies
        between them than they have."""
        shard, members = self._members[index]
        begin = min(offset for offset, _, _ in members.values())
        end = max(offset + size for offset, size, _ in members.values())
        is_apart = end - begin > 2 * sum(size for _, size, _ in members.values()) + GAP_BYTES
        data = b"" if is_apart else self._read(shard, begin, end - begin)
        found: dict[str, Any] = {KEY: self.keys[index]}
        for field, (offset, size, crc) in members.items():
            if is_apart:
                piece = self._read(shard, offset, size)
            else:
                piece = data[offset - begin : offset - begin + size]
            if len(piece) != size or (crc >= 0 and zlib.crc32(piece) != crc):
                raise DataError(
                    f"{self.shards[shard]}: field {field} of sample {self.keys[index]} is damaged "
                    f"({len(piece)} of {size} bytes at {offset}): pack the source again"
                )
            found[field] = piece
        has_sums = all(crc >= 0 for _, _, crc in members.values())
        if not has_sums and _stamp(os.fstat(self._file(shard))) != self._stamps[shard]:
            raise changed(str(self.shards[shard]), "Make a new ShardSet of the folder")
        return found

    def decode(self, fields: Fields) -> Any:
        return fields if self.decode_fields is None else self.decode_fields(fields)

    # ---- files ---------------------------------------------------------------------------

    def _read(self, shard: int, begin: int, size: int) -> bytes:
        try:
            return os.pread(self._file(shard), size, begin)
        except OSError as error:
            raise DataError(
                f"{self.shards[shard]} cannot be read: {error.strerror}; is its disk still there?"
            ) from error

    def _file(self, shard: int) -> int:
        """Opened when it is first read; every process has its own."""
        if self._owner != os.getpid():
            self._owner, self._files = os.getpid(), {}
        if shard not in self._files:
            number = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):  # reading ahead would read what is not asked for
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
            self._files[shard] = number
        return self._files[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def close(self) -> None:
        if self._owner == os.getpid():
            for number in self._files.values():
                os.close(number)
        self._files = {}

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()


Samples = Sequence[tuple[str, Mapping[str, Member]]]


def _stamp(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_size, facts.st_mtime_ns


def _opened(folder: Path) -> Iterator[tuple[Path, Samples]]:
    """Every shard of a folder with its samples, in order."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder of shards {folder}: make one with terrazzo data pack")
    if (folder / MANIFEST).exists():
        yield from _indexed(folder)
        return
    tars = sorted(folder.glob("*.tar"))
    if any(path.with_suffix(".json").exists() for path in tars) or list(folder.glob(".shard-*")):
        raise UsageError(
            f"packing into {folder} was not finished: give the same terrazzo data pack again"
        )
    if not tars:
        raise UsageError(f"{folder} holds no shards (*.tar): make some with terrazzo data pack")
    for path in tars:
        yield path, scan(path)


def _indexed(folder: Path) -> Iterator[tuple[Path, Samples]]:
    manifest = folder / MANIFEST
    try:
        shards = Shards.from_json(manifest.read_text(encoding="utf-8"))
    except (OSError, UsageError) as error:
        raise DataError(f"{manifest}: {error}") from error
    for name in shards.names:
        path, sidecar = folder / f"{name}.tar", folder / f"{name}.json"
        try:
            index = ShardIndex.from_json(sidecar.read_text(encoding="utf-8"))
            size = path.stat().st_size
        except (OSError, UsageError) as error:
            raise DataError(f"shard {path} is not whole: {error}; pack the source again") from error
        if size != index.size_bytes:
            raise DataError(
                f"shard {path} has {size} bytes, its index says {index.size_bytes}: it was cut "
                "short or changed; pack the source again"
            )
        yield path, index.samples


def scan(path: Path) -> Samples:
    """The samples of a tar that has no index: its headers, read one after the other."""
    found: dict[str, dict[str, Member]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, field = split_name(member.name)
                if member.isfile() and key and field:
                    found.setdefault(key, {})[field] = (member.offset_data, member.size, -1)
                    end = member.offset_data + member.size
                    if end > path.stat().st_size:
                        raise tarfile.ReadError(f"{member.name} ends beyond the file")
    except (tarfile.TarError, OSError, EOFError) as error:
        done = count_text(len(found), "sample")
        raise DataError(
            f"{path} is no whole tar file ({error}, after {done}): get or pack it again"
        ) from error
    if not found:
        raise DataError(f"{path} holds no samples: its files need names such as 0001.jpg")
    return list(found.items())

"""Packing: a folder of small files written as shards, whole ones only, and the source left alone.

A shard is written under a name that begins with a dot, synced, read back and compared by hash, and
only then gets its name. Packing that was stopped goes on where it was: which files go into which
shard follows from their names and sizes, and shards that are there are checked and kept.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from terrazzo.errors import DataError, UsageError
from terrazzo.records import document
from terrazzo.records.shards import MANIFEST, Member, ShardIndex, Shards
from terrazzo.records.units import bytes_text

SHARD_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 512
"""Tar's unit: a header takes one, and data is filled up to whole ones."""

Tell = Callable[[int, int], None]
"""Hears of bytes that are packed, and of all bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """One file to pack, as it was when the folder was listed."""

    name: str
    path: Path
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Sample:
    key: str
    files: tuple[tuple[str, File], ...]
    """By field, in the order of fields."""

    @property
    def size_bytes(self) -> int:
        return sum(packed_bytes(file.size_bytes) for _, file in self.files)


@dataclass(frozen=True, slots=True)
class Packed:
    """What packing did."""

    shards: Shards
    kept: int
    """Shards that were there already and are whole."""


def packed_bytes(size_bytes: int) -> int:
    """What a file takes in a tar."""
    return BLOCK_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


# ---- what goes where ------------------------------------------------------------------------


def samples_of(source: Path, *, only: Sequence[str] = (), by_name: bool = False) -> list[Sample]:
    """The files under a folder as samples, sorted by key.

    ``only`` takes these fields alone; ``by_name`` joins files of one name in different folders.
    """
    if not source.is_dir():
        what = "is no folder" if source.exists() else "is not there"
        raise UsageError(f"source {source} {what}: name the folder that holds the files to pack")
    found: dict[str, dict[str, File]] = {}
    for file in _listed(source):
        key, field = split_name(file.name)
        if only and field not in only:
            continue
        if not key or not field:
            raise DataError(
                f"{file.path} has no extension, so it is no field of a sample: rename it, or take "
                "some fields only, such as --only jpg,json"
            )
        key = PurePosixPath(key).name if by_name else key
        other = found.setdefault(key, {}).setdefault(field, file)
        if other is not file:
            raise DataError(
                f"{other.path} and {file.path} would both be field {field} of sample {key}: pack "
                "without --by-name, or take some fields only (--only)"
            )
    if not found:
        wanted = f" with the fields {', '.join(only)}" if only else ""
        raise DataError(f"source {source} holds no files{wanted}: there is nothing to pack")
    return [Sample(key, tuple(sorted(fields.items()))) for key, fields in sorted(found.items())]


def split_name(name: str) -> tuple[str, str]:
    """Key and field, at the first dot of the last part: as webdataset does it."""
    path = PurePosixPath(name)
    stem, _, field = path.name.partition(".")
    return (str(path.with_name(stem)) if stem else "", field)


def _listed(source: Path) -> Iterator[File]:
    def refuse(error: OSError) -> None:
        raise DataError(f"folder {error.filename} cannot be read: {error.strerror}; allow it")

    above: dict[Path, tuple[Path, ...]] = {}
    for folder, below, names in os.walk(source, onerror=refuse, followlinks=True):
        own, lies_in = Path(folder).resolve(), above.pop(Path(folder), ())
        if own in lies_in:
            raise DataError(f"folder {folder} is a link to one that it lies in: remove the link")
        below[:] = sorted(name for name in below if not name.startswith("."))
        above |= {Path(folder) / name: (*lies_in, own) for name in below}
        for name in sorted(names):
            path = Path(folder) / name
            if name.startswith("."):
                continue
            try:
                facts = path.stat()
            except OSError as error:
                raise DataError(
                    f"{path} cannot be read: {error.strerror}; mend or remove it"
                ) from error
            if path.is_file():
                within = path.relative_to(source).as_posix()
                yield File(within, path, facts.st_size, facts.st_mtime_ns)


def shards_of(samples: Iterable[Sample], shard_bytes: int) -> list[list[Sample]]:
    """Samples in order, cut before a shard would grow beyond its size; none is split."""
    shards: list[list[Sample]] = []
    filled = 0
    for sample in samples:
        if not shards or filled + sample.size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(sample)
        filled += sample.size_bytes
    return shards


# ---- writing --------------------------------------------------------------------------------


def pack(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    only: Sequence[str] = (),
    by_name: bool = False,
    tell: Tell = lambda done, total: None,
) -> Packed:
    """Writes the files under ``source`` as shards into the folder ``target``."""
    if shard_bytes < 1 << 16:
        raise UsageError(f"shards of {bytes_text(shard_bytes)} are no use: give 64KiB or more")
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise UsageError(f"target {target} lies inside source {source}: it would pack itself")
    parts = shards_of(samples_of(source, only=only, by_name=by_name), shard_bytes)
    names = [f"shard-{number:06}" for number in range(len(parts))]
    _prepare(target, names)
    kept = _kept(target, names, parts)
    total = sum(sample.size_bytes for part in parts for sample in part)
    _require_room(target, [part for n, part in zip(names, parts, strict=True) if n not in kept])
    done = 0
    indices = []
    for name, part in zip(names, parts, strict=True):
        index = kept.get(name) or _write(target, name, part, tell=tell, done=done, total=total)
        indices.append(index)
        done += sum(sample.size_bytes for sample in part)
        tell(done, total)
    shards = Shards(
        tuple(names), sum(len(part) for part in parts), sum(index.size_bytes for index in indices)
    )
    _put(target / MANIFEST, shards.to_json())
    return Packed(shards, len(kept))


def _prepare(target: Path, names: Sequence[str]) -> None:
    """The folder, with nothing in it that this packing would not write itself."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        present = sorted(path.name for path in target.iterdir())
    except OSError as error:
        raise UsageError(f"target {target} cannot be used: {error.strerror}; name another") from (
            error
        )
    own = {MANIFEST, *(f"{name}{end}" for name in names for end in (".tar", ".json"))}
    for name in present:
        if name.startswith(".shard-") and name.endswith(".part"):
            (target / name).unlink()  # of a packing that was stopped
        elif name not in own:
            raise UsageError(
                f"target {target} holds {name}, which does not belong to these shards: name an "
                "empty folder, or the one of a packing with the same source and options"
            )


def _kept(
    target: Path, names: Sequence[str], parts: Sequence[list[Sample]]
) -> dict[str, ShardIndex]:
    """Shards that an earlier packing of the same files has finished, checked by hash."""
    found = {}
    for name, part in zip(names, parts, strict=True):
        tar, sidecar = target / f"{name}.tar", target / f"{name}.json"
        if not tar.exists():
            continue
        try:
            index = ShardIndex.from_json(sidecar.read_text(encoding="utf-8"))
        except (OSError, UsageError) as error:
            raise UsageError(
                f"{tar} was not written by this command (no index beside it): name another target"
            ) from error
        if index.source != _digest(part):
            raise UsageError(
                f"{tar} holds other files than {name} of this packing would: the source, or an "
                "option, has changed since. Name an empty target"
            )
        if tar.stat().st_size == index.size_bytes and sha256_of(tar) == index.sha256:
            found[name] = index
    return found


def _digest(part: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in part:
        for field, file in sample.files:
            row = (sample.key, field, file.name, file.size_bytes, file.changed_ns)
            digest.update(f"{row!r}\n".encode())
    return digest.hexdigest()


def _require_room(target: Path, parts: Sequence[Sequence[Sample]]) -> None:
    needed = sum(sample.size_bytes for part in parts for sample in part)
    needed += len(parts) * tarfile.RECORDSIZE
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"target {target} has {bytes_text(free)} free, these shards take {bytes_text(needed)}: "
            "make room, or name a target on another disk"
        )


def _write(
    target: Path, name: str, part: Sequence[Sample], *, tell: Tell, done: int, total: int
) -> ShardIndex:
    scratch, final = target / f".{name}.tar.part", target / f"{name}.tar"
    try:
        with scratch.open("wb") as raw:
            sink = _Hashed(raw)
            rows = _fill(sink, part, tell=lambda more: tell(done + more, total))
            raw.flush()
            os.fsync(raw.fileno())
            if hasattr(os, "posix_fadvise"):  # read back what the medium holds, not what was meant
                os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        index = ShardIndex(name, sink.size, sink.digest, _digest(part), tuple(rows))
        if sha256_of(scratch) != index.sha256:
            raise DataError(
                f"{final} reads back differently than it was written: {target} is not to be "
                "trusted with data; name a target on another disk"
            )
        _put(target / f"{name}.json", index.to_json())
        scratch.replace(final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(_full(target, part)) from error
        raise DataError(f"cannot write {final}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return index


def _full(target: Path, part: Sequence[Sample]) -> str:
    free = shutil.disk_usage(target).free
    needed = sum(sample.size_bytes for sample in part)
    return (
        f"{target} is full: {bytes_text(free)} free, the next shard takes {bytes_text(needed)}. "
        f"Finished shards are kept; make room and give the same command again"
    )


def _fill(
    sink: _Hashed, part: Sequence[Sample], *, tell: Callable[[int], None]
) -> list[tuple[str, dict[str, Member]]]:
    rows: list[tuple[str, dict[str, Member]]] = []
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for sample in part:
            rows.append((sample.key, dict(_added(tar, sample))))
            tell(sink.size)
    return rows


def _added(tar: tarfile.TarFile, sample: Sample) -> Iterator[tuple[str, Member]]:
    for field, file in sample.files:
        info = tarfile.TarInfo(f"{sample.key}.{field}")
        info.size, info.mtime, info.mode = file.size_bytes, file.changed_ns // 10**9, 0o644
        try:
            with file.path.open("rb") as raw:
                read = _Summed(raw)
                tar.addfile(info, read)
                facts = os.fstat(raw.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(f"{file.path} cannot be read: {error}; mend or remove it") from error
        if (facts.st_size, facts.st_mtime_ns) != (file.size_bytes, file.changed_ns):
            raise DataError(
                f"{file.path} has changed while it was packed ({file.size_bytes} bytes before, "
                f"{facts.st_size} now): let nothing write there, and give the same command again"
            )
        begin = tar.offset - -(-file.size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        yield field, (begin, file.size_bytes, read.crc)


def _put(path: Path, text: str) -> None:
    try:
        document.write(path, text + "\n")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; make room, and again") from error


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


class _Hashed(io.RawIOBase):
    """What is written, counted and hashed on its way."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self._raw, self._hash, self.size = raw, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._raw.write(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class _Summed(io.RawIOBase):
    """What is read, with its CRC."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self._raw, self.crc = raw, 0

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        self.crc = zlib.crc32(data, self.crc)
        return data

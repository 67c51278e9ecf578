"""Shards: tar files of whole samples, and where in them each field of each sample lies.

    folder/shard-000000.tar      samples one after the other, as webdataset reads them
    folder/shard-000000.json     the index of this shard
    folder/shards.json           written last: all shards are there

A sample is files with one key, the path up to the first dot of its name; what follows the dot is
the field: ``cats/017.jpg`` and ``cats/017.seg.png`` are the fields ``jpg`` and ``seg.png`` of the
sample ``cats/017``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.records import document

KIND, INDEX_KIND, VERSION = "shards", "shard index", 1
MANIFEST = "shards.json"

Member = tuple[int, int, int]
"""Offset, size and CRC-32 of a field's bytes; a CRC of -1 is not known."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One shard: for every sample its fields, and what the whole file must hash to."""

    name: str
    size_bytes: int
    sha256: str
    source: str
    """A digest of the files that went into it, by name, size and time."""
    samples: tuple[tuple[str, Mapping[str, Member]], ...]

    def to_json(self) -> str:
        body = {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "source": self.source,
            "samples": [[key, dict(fields)] for key, fields in self.samples],
        }
        return document.dump(INDEX_KIND, VERSION, body)

    @classmethod
    def from_json(cls, text: str) -> ShardIndex:
        body = document.parse(text, INDEX_KIND, VERSION)
        with document.reading(INDEX_KIND):
            return cls(
                str(body["name"]),
                int(body["size_bytes"]),
                str(body["sha256"]),
                str(body["source"]),
                tuple((str(key), _fields(fields)) for key, fields in body["samples"]),
            )


def _fields(table: Mapping[str, Any]) -> dict[str, Member]:
    found = {}
    for field, (offset, size, crc) in table.items():
        found[field] = (int(offset), int(size), int(crc))
    return found


@dataclass(frozen=True, slots=True)
class Shards:
    """All shards of a set, complete."""

    names: tuple[str, ...]
    samples: int
    size_bytes: int

    def to_json(self) -> str:
        body = {"names": self.names, "samples": self.samples, "size_bytes": self.size_bytes}
        return document.dump(KIND, VERSION, body)

    @classmethod
    def from_json(cls, text: str) -> Shards:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            return cls(
                tuple(str(name) for name in body["names"]),
                int(body["samples"]),
                int(body["size_bytes"]),
            )

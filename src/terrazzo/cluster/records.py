"""Records of devices elsewhere, collected into a run's folder here while they are written."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}")
MOST_FILES = 200
MOST_BYTES = 4 << 30
RUN = "run.json"
"""Written here, by the starter."""


class Collected:
    """What one device sends; of files with one name, the first device's is kept."""

    def __init__(self, folder: Path, device: int) -> None:
        self._folder, self._device = folder, device
        self._files: dict[str, IO[bytes] | None] = {}
        self._bytes = 0
        self._vitals = (folder / f"vitals-{device}.jsonl").open("a", encoding="utf-8")

    def add(self, body: bytes) -> None:
        """A piece of a file: its name, a zero, and what follows what came before."""
        name, _, data = body.partition(b"\0")
        file = self._file(name.decode("utf-8", "replace"))
        self._bytes += len(data)
        if file is not None and self._bytes <= MOST_BYTES:
            with suppress(OSError):  # a full disk here ends the record, not the training
                file.write(data)

    def note(self, vitals: dict[str, Any]) -> None:
        with suppress(OSError):
            self._vitals.write(json.dumps(vitals) + "\n")
            self._vitals.flush()

    def close(self) -> None:
        for file in (*self._files.values(), self._vitals):
            if file is not None:
                with suppress(OSError):
                    file.close()

    def _file(self, name: str) -> IO[bytes] | None:
        if name not in self._files and len(self._files) < MOST_FILES:
            self._files[name] = self._open(name)
        return self._files.get(name)

    def _open(self, name: str) -> IO[bytes] | None:
        """None for a name that leads elsewhere, or that another device has brought."""
        path = self._folder / name
        if not NAME.fullmatch(name) or ".." in name or name == RUN:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("xb", buffering=0)
        except OSError:
            return None

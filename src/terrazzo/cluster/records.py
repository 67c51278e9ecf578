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
    """What one device sends; of files with one name, later devices' go to folders of their own."""

    def __init__(self, folder: Path, device: int, *, before: Collected | None = None) -> None:
        """``before`` is what an earlier process of this device has sent: all of it comes again."""
        self._folder, self._device = folder, device
        self._own: set[Path] = before._own if before is not None else set()
        self._files: dict[str, IO[bytes] | None] = {}
        self._bytes = 0
        self.dropped: set[str] = set()
        """Names of files that are not here, or not whole."""
        self._vitals = (folder / f"vitals-{device}.jsonl").open("a", encoding="utf-8")

    def add(self, body: bytes) -> None:
        """A piece of a file: its name, a zero, and what follows what came before."""
        name, _, data = body.partition(b"\0")
        text = name.decode("utf-8", "replace")
        file = self._file(text)
        self._bytes += len(data)
        try:
            if file is None or self._bytes > MOST_BYTES or file.write(data) != len(data):
                self.dropped.add(text)
        except OSError:  # a full disk here ends the record, not the training
            self.dropped.add(text)

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
        """None for a name that leads elsewhere, or where nothing can be written."""
        if not NAME.fullmatch(name) or ".." in name:
            return None
        own = self._folder / f"device-{self._device}" / name
        for path in (own,) if name == RUN else (self._folder / name, own):
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                file: IO[bytes] = path.open("wb" if path in self._own else "xb", buffering=0)
                self._own.add(path)
                return file
        return None

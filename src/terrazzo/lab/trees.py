"""Trees: knobs of emulated devices, as files of simulated boards.

A device whose preset names a board has that board's knobs; the others have none. This machine's
own are out of reach of all of them. Nothing becomes slower by a knob: quotas stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from terrazzo.boards import Rig, load_board


@dataclass(frozen=True, slots=True)
class Trees:
    """A folder with one folder for each device."""

    folder: Path

    @classmethod
    @contextmanager
    def made(cls, boards: Sequence[str]) -> Iterator[Trees]:
        """While the block runs."""
        with TemporaryDirectory(prefix="terrazzo-lab-boards-") as name:
            trees = cls(Path(name))
            for device, board in enumerate(boards):
                trees.root(device).mkdir()
                if board:
                    Rig(load_board(board), trees.root(device))
            yield trees

    def root(self, device: int) -> Path:
        return self.folder / f"device-{device}"

"""The scribe: writes checkpoints beside the training, from copies of what they hold."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from terrazzo.errors import RunError
from terrazzo.runtime.checkpoint import Shelf
from terrazzo.runtime.parcel import copied


class Scribe:
    """One checkpoint at a time: the next waits until the one before is on disk."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._thread: threading.Thread | None = None
        self._problem: RunError | None = None
        self._has_begun = False

    def write(self, step: int, model: Mapping[str, Tensor], rest: Any) -> None:
        """Copies, and comes back; a copy that could not be written is told of at the next one."""
        self.finish()
        copy = copied([dict(model), rest], name="the run")  # training goes on meanwhile
        self._thread = threading.Thread(target=self._write, args=(step, *copy), name="checkpoint")
        self._thread.start()

    def begin(self, first: int) -> None:
        """Before its first checkpoint: those of later steps than a run began with are another's."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            steps, folder = self.shelf.put_aside(above=first)
        except OSError as error:
            told = f"checkpoints of another training stay in {self.shelf.folder}: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=3)
            return
        if steps:
            told = f"held checkpoints of another training, up to step {steps[-1]}: they are in"
            print(f"terrazzo: {self.shelf.folder} {told} {folder} now", file=sys.stderr, flush=True)

    def _write(self, step: int, model: Mapping[str, Tensor], rest: Any) -> None:
        try:
            self.shelf.save(step, model, rest)
        except RunError as error:
            self._problem = error

    def finish(self) -> None:
        """Waits for what is being written. Training goes on without it: a warning must do."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            warnings.warn(str(problem), RuntimeWarning, stacklevel=3)

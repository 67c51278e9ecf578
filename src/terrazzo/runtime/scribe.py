"""The scribe: writes checkpoints beside the training, from copies of what they hold."""

from __future__ import annotations

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

    def write(self, step: int, model: Mapping[str, Tensor], rest: Any) -> None:
        """Copies, and comes back; a copy that could not be written is told of at the next one."""
        self.finish()
        copy = copied([dict(model), rest], name="the run")  # training goes on meanwhile
        self._thread = threading.Thread(target=self._write, args=(step, *copy), name="checkpoint")
        self._thread.start()

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

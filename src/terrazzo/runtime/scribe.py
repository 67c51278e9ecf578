"""The scribe: writes checkpoints beside the training, from copies of what they hold."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from terrazzo.errors import RunError
from terrazzo.runtime.checkpoint import Shelf


class Scribe:
    """One checkpoint at a time: the next waits until the one before is on disk."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._thread: threading.Thread | None = None
        self._problem: RunError | None = None

    def write(self, step: int, model: Mapping[str, Tensor], rest: Any) -> None:
        """Copies, and comes back; a copy that could not be written is told of at the next one."""
        self.finish()
        copies = {name: tensor.detach().clone() for name, tensor in model.items()}
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, _copied(rest)), name="checkpoint"
        )
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


def _copied(value: Any) -> Any:
    """Tensors in nested containers, in memory of their own: training goes on meanwhile."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copy = type(value)()
        copy.update((key, _copied(part)) for key, part in value.items())
        return copy
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(part) for part in value)
    return value

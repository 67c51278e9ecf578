"""Board: the store through which gloo's connections find each other, on no device in particular.

Whatever a device posts, it tells all members of its view; each looks things up in its own copy.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from terrazzo.members.control import Control


class Board(Store):
    """The part of torch's store that gloo needs, in one epoch of a run."""

    def __init__(self, control: Control, epoch: int, timeout_s: float) -> None:
        super().__init__()
        self._control, self._epoch, self._timeout_s = control, epoch, timeout_s

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._control.post(self._epoch, key, data)

    def get(self, key: str) -> bytes:
        return self._control.look(self._epoch, key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._control.has(self._epoch, key) for key in keys)

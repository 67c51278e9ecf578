"""Pending: a sum under way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from terrazzo.runtime.staging import from_host


@dataclass(frozen=True)
class Pending:
    """``guard`` makes of a broken connection an error that names the device."""

    guard: Callable[[], AbstractContextManager[None]]
    work: Any
    tensor: Tensor
    host: Tensor

    def wait(self) -> Tensor:
        with self.guard():
            self.work.wait()
        return from_host(self.tensor, self.host)

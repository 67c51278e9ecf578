"""An inquiry: after a connection broke, survivors find out through the store who is gone."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

GONE_AFTER_S = 3.0
"""How long survivors wait for each other's sign of life before they name the missing."""

LONGEST_GIST = 120

SILENT_AFTER_S = 2.0
"""How much longer a store may take to answer before it counts as gone itself."""


def report_failure(store: Store, device: int, reason: str) -> None:
    """Leaves word for the others before this device gives up."""
    with contextlib.suppress(Exception):
        store.set(f"terrazzo/failed/{device}", reason)


def linger(store: Store, device: int, others: Sequence[int]) -> None:
    """Device 0, which may host the store, stays until the others have heard what it holds."""
    deadline = time.monotonic() + GONE_AFTER_S
    with contextlib.suppress(Exception):
        while device == 0 and time.monotonic() < deadline:
            if all(store.check([f"terrazzo/heard/{other}"]) for other in others):
                return
            time.sleep(0.02)


class Inquiry:
    """Asks once; ``text`` says what is known of the others."""

    def __init__(self, store: Store, device: int, devices: int) -> None:
        self.reasons: dict[int, str] = {}
        self.missing: list[int] | None = None
        self._store, self._device = store, device
        self._others = [other for other in range(devices) if other != device]
        # In a thread: a store on a stopped device answers never, and not with an error.
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        thread.join(GONE_AFTER_S + SILENT_AFTER_S)

    def _ask(self) -> None:
        """Until somebody's reason is found, or all have reported, or time is up."""
        deadline = time.monotonic() + GONE_AFTER_S
        with contextlib.suppress(Exception):  # the store's host may go too; what is known stays
            self._store.set(f"terrazzo/here/{self._device}", "1")
            while True:
                for other in self._others:
                    if self._store.check([f"terrazzo/failed/{other}"]):
                        self.reasons[other] = self._store.get(f"terrazzo/failed/{other}").decode()
                self.missing = [
                    other
                    for other in self._others
                    if not self._store.check([f"terrazzo/here/{other}"])
                ]
                if self.reasons or not self.missing or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            self._store.set(f"terrazzo/heard/{self._device}", "1")

    @property
    def here(self) -> list[int]:
        """Who else has noticed so far; those who failed with a word of their own are not asked."""
        gone = self.reasons or self.missing or []
        return [other for other in self._others if other not in gone]

    @property
    def text(self) -> str:
        if self.reasons:
            return "; ".join(f"device {d} failed: {why}" for d, why in self.reasons.items())
        # A store that never answered lives on device 0 (when no launcher hosts it).
        missing = [0] if self.missing is None and self._device != 0 else self.missing or []
        names = ", ".join(f"device {device}" for device in missing)
        return f"{names} stopped answering" if names else ""


def gist(error: RuntimeError) -> str:
    """What an error of torch.distributed says, without the places in its sources."""
    line = (str(error).splitlines() or [""])[0]
    line = re.sub(r"\[?\S+\.(?:cc|cpp|h|hpp):\d+\]?:?\s*", "", line)
    words = re.split(r"\.\s|\s+This may|\s+Original error", line, maxsplit=1)[0].strip(" .")
    return words[:LONGEST_GIST] or type(error).__name__

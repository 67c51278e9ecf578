"""The cause of a run's end: the device that failed first, among all that end because of it.

Others may be gone before it: a device that has failed stays a moment to tell them why.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.cluster.process import Process

FOLLOWED = "PeerLost: "
"""What a device says last that has ended because of another."""


class Cause:
    """As far as the starter knows it."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.is_told = False

    def hear(self, failed: Sequence[Process], *, told_to_end: bool) -> None:
        """These have just failed; ``told_to_end``: because they were told to, all but the first."""
        # Of several found at once, one ended by a signal is the cause: its peers only noticed.
        found = min(failed, key=lambda process: (_followed(process), (process.status or 0) > 0))
        if self.process is None or (self._is_doubtful and not told_to_end and not _followed(found)):
            self.process = found

    def is_sure(self, *, others: bool) -> bool:
        """Whether it can be told: nobody who may still end can be another."""
        return self.process is not None and not (self._is_doubtful and others)

    @property
    def _is_doubtful(self) -> bool:
        return self.process is not None and _followed(self.process)


def _followed(process: Process) -> bool:
    return any(FOLLOWED in line for line in process.last_lines)

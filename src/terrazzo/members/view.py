"""View: who belongs to the run in one epoch, and who of them may go on without the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class View(NamedTuple):
    """Devices keep the number they started with; ``tie`` decides where two halves part."""

    epoch: int
    members: tuple[int, ...]
    tie: int

    def next(self, members: Collection[int]) -> View:
        """The view after this one."""
        tie = self.tie if self.tie in members else min(members)
        return View(self.epoch + 1, tuple(sorted(members)), tie)


def goes_on(some: Collection[int], view: View) -> bool:
    """Whether these members of a view may decide for all: any two such sets share a device."""
    votes = len(set(some) & set(view.members))
    half = 2 * votes == len(view.members) and view.tie in some
    return 2 * votes > len(view.members) or half

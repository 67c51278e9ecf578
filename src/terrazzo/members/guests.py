"""Guests: devices that have a line to members of a run, and wait to be let in.

One is let in only where it has a line to every member. Members change while it waits, and two may
come at one time: so a guest says to whom it has lines, and who has heard it tells it of the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

ASK_S = 5.0
"""How long a guest waits before it asks again."""


class Guests:
    """Who waits, as one member knows it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._lines: dict[int, frozenset[int]] = {}
        self._invited: set[int] = set()
        self._numbers = 0

    def number(self) -> int:
        """A number for somebody who comes later, that no other member gives."""
        self._numbers += 1
        return 1000 * (self._me + 1) + self._numbers

    def hear(self, guest: int, lines: Collection[int]) -> None:
        """It wants to join, and has lines to these."""
        self._lines[guest] = frozenset(lines)

    def ready(self, members: Collection[int]) -> set[int]:
        """Those who have a line to every member."""
        here = set(members)
        return {g for g, lines in self._lines.items() if g not in here and here <= lines}

    def unready(self, members: Collection[int]) -> set[int]:
        """Those who must be told where the rest of the members are."""
        return set(self._lines) - set(members) - self.ready(members)

    def invite(self, guest: int) -> None:
        self._invited.add(guest)

    def settle(self, members: Collection[int]) -> None:
        """A view was decided: who was invited and is not in it has to ask again.

        Otherwise it would be invited before every batch, and no batch would ever be used.
        """
        for guest in self._invited | set(members):
            self._lines.pop(guest, None)
        self._invited.clear()


def known(addresses: Mapping[int, str], members: Collection[int]) -> dict[str, str]:
    """Where members are, as it is told."""
    return {str(member): addresses[member] for member in members if member in addresses}

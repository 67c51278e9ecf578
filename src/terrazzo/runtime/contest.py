"""Contest: plans that promise about as much are tried in the first steps, the fastest stays.

Predicted times are right to a few percent, so plans that lie closer together than that are in no
order. Steps by any of them are steps of the same training, to the same numbers: to try them takes
no step more than to train does, only weights that live elsewhere have to move.

Every plan has a turn of some laps, which are steps with all that belongs to them; the first are not
counted, since memory and connections are as the plan before has left them. Those that come out
close to the best have a second turn, and so has the first plan, the planner's choice: it was tried
when everything was cold.
"""

from __future__ import annotations

from statistics import median

SKIPPED = 2
"""Laps of a turn that do not count."""
LEAST, MOST, TURN_S = 3, 12, 10.0
"""Laps that do: so many at least and at most, and as many as take so long."""
FAR = 1.15
"""Times the best: who takes longer in two laps that count has had its turn."""
CLOSE, FINALISTS = 1.05, 3
"""Times the best, and so many at most: who have a second turn."""
WORTH = 0.01
"""Of the first plan's time: what another one must save to take its place."""


class Contest:
    """Laps of several plans, by number; the first is the one that a run begins with."""

    def __init__(self, plans: int) -> None:
        self.plans = plans
        self.current = 0
        """The plan that the next lap is by."""
        self.laps = 0
        self.is_over = plans < 2
        self._waiting = list(range(1, plans))
        self._finalists: list[int] = []
        self._turn: list[float] = []
        self._skip = SKIPPED
        self.seconds: dict[int, float] = {}
        """Of a lap by each plan, in its last turn."""

    def lap(self, seconds: float) -> None:
        """A lap by the current plan took so long."""
        self.laps += 1
        if self._skip:
            self._skip -= 1
            return
        self._turn.append(seconds)
        if self._is_far() or self._is_enough():
            self._end_turn()

    def _is_far(self) -> bool:
        """Two laps say so: one may have been disturbed."""
        if not self.current or len(self._turn) < 2:
            return False
        return min(self._turn[-2:]) > FAR * min(self.seconds.values())

    def _is_enough(self) -> bool:
        count = len(self._turn)
        return count >= MOST or (count >= LEAST and sum(self._turn) >= TURN_S)

    def _end_turn(self) -> None:
        self.seconds[self.current] = median(self._turn)
        if not self._waiting and not self._finalists:
            self._finalists = self._closest()
            self._waiting = self._finalists if len(self._finalists) > 1 else []
        if self._waiting:
            self.current, *self._waiting = self._waiting
            self._turn, self._skip = [], SKIPPED
        else:
            self.current, self.is_over = self._winner(), True

    def _closest(self) -> list[int]:
        """Those close to the best, and the first plan behind them."""
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        most_s = CLOSE * self.seconds[order[0]]
        close = [plan for plan in order if self.seconds[plan] <= most_s][:FINALISTS]
        return [*(plan for plan in close if plan), 0]

    def _winner(self) -> int:
        best = min(self._finalists, key=self.seconds.__getitem__)
        return best if self.seconds[best] < (1 - WORTH) * self.seconds[0] else 0

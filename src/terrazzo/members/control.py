"""Control: what a device asks of the other members before it lets a result be seen."""

from __future__ import annotations

import contextlib
import selectors
import time
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from terrazzo.errors import PeerLost, RunError
from terrazzo.members.ear import Ear
from terrazzo.members.guests import ASK_S
from terrazzo.members.health import BEAT_S, Health
from terrazzo.members.view import View

FAILED_S = 1.0
"""How long they have to read why one has failed."""
ENDED_S = 2.0
"""How long after a device has ended its script the others may still need what it has sent."""
QUIET_S, MOST_STAY_S = 1.5, 60.0
"""It stays longer while one of them has been silent for so long; but no longer than this."""


INTERRUPTED = "was interrupted"
"""Why a device leaves whose user has pressed Ctrl-C."""


class Interrupted(RunError):
    """The operation in flight is discarded: the members agree anew on who they are."""


class Stranded(PeerLost):
    """Too few are left to go on: this device stops, so that no two groups do."""


class Control(Ear):
    """This device among the members of a run, as its main thread sees it."""

    # ---- asked by the main thread --------------------------------------------------------

    @property
    def is_left_behind(self) -> bool:
        """The others go on without this device, or too few are left to go on."""
        return self._council.seat.is_out or self.is_stranded

    @property
    def is_stranded(self) -> bool:
        """Too few are left to go on; others may, who have lost this device."""
        return self._council.seat.is_stranded

    @property
    def guests(self) -> set[int]:
        """Devices that wait to be let in, and say that they have a line to every member."""
        with self._changed:
            return self._guests.ready(self.view.members) & set(self._lines)

    def admit(self, guests: Iterable[int]) -> None:
        """Calls for a new view, with these in it; others may have called for it, and have it."""
        guests = set(guests)
        with self._changed:
            if guests <= set(self.view.members):
                return
            for guest in self.guests & guests:
                self._guests.invite(guest)
                self._deliver(self._council.invite(guest))
            self._deliver(self._council.alarm())

    def check(self, epoch: int) -> None:
        """Raises where the members are no longer at work in this epoch."""
        with self._changed:
            self._check_heard()
            self._check_left(late=self.entered > self.done)
            self._check_settled(epoch)

    def finish(self, number: int, epoch: int) -> None:
        """The result of an operation may be seen; from an alarm on, none may."""
        with self._changed:
            self._check_settled(epoch)
            self.done = number

    def _check_settled(self, epoch: int) -> None:
        seat = self._council.seat
        if seat.alarmed or seat.is_out or seat.view.epoch != epoch:
            raise Interrupted("the members of the run change")

    def turn_away(self, devices: Iterable[int], why: str) -> None:
        """Members that the others go on without."""
        with self._changed:
            for device in devices:
                self._give_up(device, why)

    def alarm(self, *, in_epoch: int | None = None) -> None:
        """Calls for a new view; in one epoch only, where that is given."""
        with self._changed:
            if in_epoch in (None, self.view.epoch):
                self._deliver(self._council.alarm())

    def next_view(self, epoch: int) -> tuple[View, dict[int, int]]:
        """Waits for the view after an epoch; gives it, and how many operations each has done."""
        self._confer(True)
        try:
            return self._conferred(epoch)
        finally:
            self._confer(False)

    def _confer(self, does: bool) -> None:
        """Tells others, or they would take this device for stuck."""
        with self._changed:
            self._confers = does
            self._deliver(self._council.appear(present=does))

    def _conferred(self, epoch: int) -> tuple[View, dict[int, int]]:
        since_s, told = time.monotonic(), epoch
        while True:
            self._call_rest()
            with self._changed:
                self._check_coming()
                seat = self._council.seat
                if seat.view.epoch > told and not seat.alarmed:
                    told = seat.view.epoch
                    self._arrive()
                    since_s = time.monotonic()
                    seat = self._council.seat
                settled = seat.committed is not None and not seat.alarmed
                if seat.view.epoch > epoch and settled:
                    return seat.view, dict(seat.ready)
                if time.monotonic() - since_s > self._stuck_s() and not seat.alarmed:
                    for device in set(seat.view.members) - set(dict(seat.ready)):
                        self._give_up(device, "is stuck: it answers, but does not come")
                self._changed.wait(BEAT_S)

    def _check_coming(self) -> None:
        """Raises where no view can come any more that this device is in."""
        self._check_heard()
        self._check_left(late=True)
        seat = self._council.seat
        if seat.is_out:
            raise PeerLost(
                f"the other devices went on without device {self.me}: it was silent or cut "
                "off for too long. Start it again to let it join them."
            )
        if seat.is_stranded:
            raise Stranded(seat.shortage(self.reasons, self.called))
        if not seat.view.members and not self._lines:
            raise PeerLost("the run has ended, or its devices are gone: nobody lets it in")

    def _arrive(self) -> None:
        """Tells all members of a new view that this device has come to it."""
        members = self.view.members
        self._guests.settle(members)
        self._deliver(self._council.arrive(self.done))
        for device in set(members) - set(self._lines) - {self.me}:
            self._give_up(device, f"has no connection to device {self.me}")

    # ---- the board: where devices find each other's addresses ----------------------------

    def post(self, epoch: int, key: str, value: bytes) -> None:
        with self._changed:
            self._board[epoch, key] = value
            message = ["post", epoch, key, b64encode(value).decode()]
            self._say([d for d in self.view.members if d != self.me], message)
            self._changed.notify_all()

    def look(self, epoch: int, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (epoch, key) not in self._board:
                self.check(epoch)
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"nobody has posted {key} within {timeout_s:g} s")
                self._changed.wait(BEAT_S)
            return self._board[epoch, key]

    def has(self, epoch: int, key: str) -> bool:
        with self._changed:
            return (epoch, key) in self._board

    # ---- as a guest ----------------------------------------------------------------------

    def ask_in(self) -> None:
        """Tells members that this device wants to join, and to whom it has lines."""
        with self._changed:
            self._asked_s = time.monotonic()
            self._say(list(self._lines), ["join", sorted(self._lines)])

    def _call_rest(self) -> None:
        """Calls members that it has no line to, and asks again: they may have changed since."""
        with self._changed:
            rest, self._rest = self._rest, {}
            missing = {d: at for d, at in rest.items() if d != self.me and d not in self._lines}
            due = time.monotonic() - self._asked_s > ASK_S
            if self.view.members or not (missing or due):
                return
        for device, where in missing.items():
            # Who does not answer is told of again, if it is still there.
            with contextlib.suppress(OSError, ValueError, TypeError):
                line = self.reach(where)
                with self._changed:
                    self._selector.register(line, selectors.EVENT_READ, line)
                    self._lines[device], self._health[device] = line, Health(time.monotonic())
                    self.addresses[device] = where
        self.ask_in()

    # ---- leaving -------------------------------------------------------------------------

    def leave(self, why: str = "") -> None:
        """Parts from the others in order; with a reason, they will not go on.

        It stays a moment: others may be in the middle of what this device has finished, and must
        have read the reason before the connection ends, which discards what was not read.
        """
        with self._changed:
            if self._closed:
                return
            self._say(list(self._lines), self._farewell(why))
        self._stay(FAILED_S if why else ENDED_S, is_well=not why)
        with self._changed:
            self._closed = True
        self._bell.close()
        self._thread.join(2 * BEAT_S)
        self._rung.close()
        for line in self._lines.values():
            line.close()
        self._strangers.close()

    def _farewell(self, why: str) -> list[Any]:
        """What the others are told: who is lost to them, and no more, does not end their run."""
        if why and self.is_left_behind:
            return ["gone", "may not go on: too few are left that it can talk to"]
        first = self.me
        if why:  # not how it has heard of it: the device that failed first, and its own words
            failed = ((device, said) for device, said in self._left.items() if said)
            first, why = next(failed, (self.me, why))
        if why and self.done < self.until:  # it has made no step with the others yet
            return ["gone", f"could not join: {why}"]
        return ["bye", why, first]

    def _stay(self, least_s: float, *, is_well: bool) -> None:
        """Longer where somebody is silent: the others may need a view without it, and results."""
        begin_s = time.monotonic()
        end_s, last_s = begin_s + least_s, begin_s + MOST_STAY_S
        while True:
            with self._changed:
                seat, now_s = self._council.seat, time.monotonic()
                here = self._here()
                quiet = {d for d in here if now_s - self._health[d].heard_s > QUIET_S}
                may_stay = is_well and now_s < last_s
                changes = seat.alarmed or seat.committed is None
                unsure = may_stay and (changes or (quiet and quiet < here))
                if not here or self._closed or (now_s > end_s and not unsure):
                    return
                attends = may_stay and changes
                if not attends:
                    self._changed.wait(0.05)
            if attends:
                if not self.see_off():
                    return
                end_s = time.monotonic() + least_s

    def _here(self) -> set[int]:
        """Other members who have not left."""
        return (set(self.view.members) & set(self._lines)) - set(self._left)

    def _check_heard(self) -> None:
        if self._trouble is not None:
            raise PeerLost(
                f"device {self.me} hears the others no more: its thread for them ended with "
                f"{type(self._trouble).__name__}: {self._trouble}. The others go on without it; "
                "start it again to let it join them."
            ) from self._trouble

    def _check_left(self, *, late: bool) -> None:
        """Somebody who has ended its script will never come; those still on their way may have
        all they need from it already."""
        for device, why in self._left.items():
            if device in self.view.members:
                if why:
                    what = why if why == INTERRUPTED else f"failed: {why}"
                    raise PeerLost(f"{self.called(device)} {what}")
                if not late or device not in self._lines:
                    raise PeerLost(f"{self.called(device)} has ended its script before the others")

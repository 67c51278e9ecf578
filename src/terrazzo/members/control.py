"""Control: lines to all other devices, and a small thread that listens to them.

The thread tells the others every second that this device lives, notices who is silent or stuck,
and holds council with the rest. It never computes and never waits, so a long convolution does not
look like death. The main thread asks it before it lets the result of an operation be seen.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.errors import PeerLost, RunError
from terrazzo.members import words
from terrazzo.members.council import Council, Seat, Sends
from terrazzo.members.door import Door
from terrazzo.members.health import BEAT_S, Health, stuck_after_s
from terrazzo.members.line import Line, LineError
from terrazzo.members.view import View

PATIENCE_S = 1.0
ENDED_S = 2.0
"""How long after a device has ended its script the others may still need what it has sent."""
FAILED_S = 1.0
"""How long they have to read why one has failed."""


class Interrupted(RunError):
    """The operation in flight is discarded: the members agree anew on who they are."""


class Control:
    """This device among the members of a run."""

    def __init__(
        self,
        me: int,
        view: View,
        *,
        lines: Mapping[int, Line],
        listener: socket.socket,
        token: str,
        addresses: Mapping[int, str],
        limit_s: float,
        wrap: Callable[[socket.socket, bool], socket.socket],
    ) -> None:
        settled = tuple((device, 0) for device in view.members)
        self.me, self.token, self.limit_s = me, token, limit_s
        self._door = Door(listener, token, wrap)
        self.addresses = dict(addresses)
        self.done = self.entered = 0
        self.is_waiting: Callable[[], bool] = lambda: False
        """Whether the main thread waits for others; told with every beat."""
        self.wake: Callable[[], None] = lambda: None
        """Breaks off whatever the main thread waits for."""
        self.reasons: dict[int, str] = {}
        """Why devices were given up."""
        self._council = Council(Seat(me, view, ready=settled, is_present=False))
        self._seen = self._council.seat
        self._lines = dict(lines)
        now_s = time.monotonic()
        self._health = {device: Health(now_s) for device in lines}
        self._guests: set[int] = set()
        self._left: dict[int, tuple[str, float]] = {}
        self._board: dict[tuple[int, str], bytes] = {}
        self._alarmed_s, self._waited = now_s, 0
        self._given_ids, self._closed, self._confers = 0, False, False
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._bell, self._rung = socket.socketpair()  # wakes the thread when it is to end
        self._selector.register(self._rung, selectors.EVENT_READ, None)
        for line in self._lines.values():
            self._selector.register(line, selectors.EVENT_READ, line)
        self._thread = threading.Thread(target=self._run, name="terrazzo members", daemon=True)
        self._thread.start()

    # ---- asked by the main thread --------------------------------------------------------

    @property
    def view(self) -> View:
        return self._council.seat.view

    @property
    def is_left_behind(self) -> bool:
        """The others go on without this device, or too few are left to go on."""
        return self._council.seat.is_out or self._council.seat.is_stranded

    @property
    def guests(self) -> set[int]:
        """Devices that wait to be let in."""
        return self._guests & set(self._lines) - set(self.view.members)

    def admit(self) -> None:
        """Calls for a new view, with those in it who wait."""
        with self._changed:
            for guest in self.guests:
                self._deliver(self._council.invite(guest))
            self._deliver(self._council.alarm())

    def check(self, epoch: int) -> None:
        """Raises where the members are no longer at work in this epoch."""
        with self._changed:
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
            with self._changed:
                self._check_left(late=True)
                seat = self._council.seat
                if seat.is_out:
                    raise PeerLost(
                        f"the other devices went on without device {self.me}: it was silent or cut "
                        "off for too long. Start it again to let it join them."
                    )
                if seat.is_stranded:
                    raise PeerLost(seat.shortage(self.reasons))
                if not seat.view.members and not self._lines:
                    raise PeerLost("the run has ended, or its devices are gone: nobody lets it in")
                if seat.view.epoch > told and not seat.alarmed:
                    told = seat.view.epoch
                    self._deliver(self._council.arrive(self.done))
                    since_s = time.monotonic()
                    seat = self._council.seat
                settled = seat.committed is not None and not seat.alarmed
                if seat.view.epoch > epoch and settled:
                    return seat.view, dict(seat.ready)
                if time.monotonic() - since_s > self._stuck_s() and not seat.alarmed:
                    for device in set(seat.view.members) - set(dict(seat.ready)):
                        self._give_up(device, "is stuck: it answers, but does not come")
                self._changed.wait(BEAT_S)

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
        return (epoch, key) in self._board

    def ask_in(self) -> None:
        """Tells all members that this device has a line to each of them, and wants to join."""
        with self._changed:
            self._say(list(self._lines), ["join"])

    # ---- leaving -------------------------------------------------------------------------

    def leave(self, why: str = "") -> None:
        """Parts from the others in order; with a reason, they will not go on.

        It stays a moment: others may be in the middle of what this device has finished, and must
        have read the reason before the connection ends, which discards what was not read.
        """
        with self._changed:
            if self._closed:
                return
            self._say(list(self._lines), ["bye", why])
            end_s = time.monotonic() + (FAILED_S if why else ENDED_S)
            while (
                set(self.view.members) & set(self._lines) - set(self._left)
                and time.monotonic() < end_s
            ):
                self._changed.wait(0.05)
            self._closed = True
        self._bell.close()
        self._thread.join(2 * BEAT_S)
        self._rung.close()
        for line in self._lines.values():
            line.close()
        self._door.listener.close()

    def _check_left(self, *, late: bool) -> None:
        """Somebody who has ended its script will never come; those still on their way may have
        all they need from it already."""
        for device, (why, when_s) in self._left.items():
            if device in self.view.members:
                if why:
                    raise PeerLost(f"device {device} failed: {why}")
                if not late or time.monotonic() - when_s > ENDED_S:
                    raise PeerLost(f"device {device} has ended its script before the others")

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        beaten_s = looked_s = time.monotonic()
        while not self._closed:
            due_s = beaten_s + BEAT_S - time.monotonic()
            events = self._selector.select(max(0.0, due_s))
            with self._changed:
                now_s = time.monotonic()
                if now_s - looked_s > 2 * BEAT_S:  # this device stood still itself
                    for health in self._health.values():
                        health.forgive(now_s - looked_s)
                looked_s = now_s
                for key, mask in events:
                    self._attend(key.fileobj, key.data, mask)
                if now_s - beaten_s >= BEAT_S:
                    beaten_s = now_s
                    self._say(list(self._lines), self._beat())
                    self._watch(now_s)
                self._changed.notify_all()
                self._wake_up(now_s)

    def _beat(self) -> list[Any]:
        return ["beat", self.entered, self._confers or self.is_waiting()]

    def _wake_up(self, now_s: float) -> None:
        """Where the main thread waits for something that will not come, it is told."""
        before, seat = self._seen, self._council.seat
        self._seen = seat
        # Who is left alone decides at once: the epoch is another before an alarm was ever seen.
        decided = seat.view.epoch != before.view.epoch and not before.alarmed
        if (seat.alarmed and not before.alarmed) or decided:
            self._alarmed_s = now_s
            self.wake()
            return
        late = any(why or now_s - when_s > ENDED_S for why, when_s in self._left.values())
        if (seat.is_out and not before.is_out) or (late and self.is_waiting()):
            self.wake()

    def _attend(self, file: Any, line: Line | None, mask: int) -> None:
        if line is None:
            stranger = self._door.answer() if file is self._door.listener else None
            if stranger is not None:
                self._selector.register(stranger, selectors.EVENT_READ, stranger)
            return
        device = next((d for d, known in self._lines.items() if known is line), None)
        try:
            if mask & selectors.EVENT_WRITE:
                line.push()
                self._selector.modify(line, selectors.EVENT_READ, line)
            messages = line.hear() if mask & selectors.EVENT_READ else []
            if line.is_behind:  # a handshake may have waited for what was heard
                line.push()
            if messages and device is not None:
                self._health[device].hear(time.monotonic())
            for message in messages:
                if device is None:
                    device = self._greeted(line, message)
                else:
                    self._heed(device, message)
        except (OSError, ValueError, TypeError, LookupError) as error:  # also what is no message
            if device is not None and device in self._lines:
                self._give_up(device, f"lost its connection: {error}")
            elif device is None:
                self._door.forget(line)
                self._drop(line)

    def _heed(self, device: int, message: Any) -> None:
        """One message of a member or a guest."""
        if not isinstance(message, list) or not message:
            raise ValueError("no message")
        kind, *rest = message
        if kind == "beat":
            now_s = time.monotonic()
            self._health[device].beat(now_s, entered=int(rest[0]), waits=bool(rest[1]))
        elif kind == "council":
            self._deliver(self._council.hear(device, words.read(rest[0])))
        elif kind == "post":
            self._board[int(rest[0]), str(rest[1])] = b64decode(rest[2])
        elif kind == "bye":
            self._left[device] = (str(rest[0]), time.monotonic())
        elif kind == "join":
            self._guests.add(device)
        else:
            raise ValueError(f"no message {kind!r}")

    def _watch(self, now_s: float) -> None:
        """Looks for who is silent or stuck, and whether patience is over."""
        seat = self._council.seat
        for line in self._door.overdue(now_s):
            self._drop(line)
        for device, health in list(self._health.items()):
            if device in self._lines and device not in self._left and health.is_silent(now_s):
                self._give_up(device, f"was silent for {now_s - health.heard_s:.1f} s")
        if self.is_waiting() and not seat.alarmed:
            self._find_stuck(now_s)
        place = sorted(seat.view.members).index(self.me) if self.me in seat.view.members else 0
        patience_s = PATIENCE_S * (1 + place) * (1 + self._waited)
        if seat.alarmed and now_s - self._alarmed_s > patience_s:
            self._alarmed_s, self._waited = now_s, self._waited + 1
            self._deliver(self._council.wait_no_longer())
        elif not seat.alarmed:
            self._waited = 0

    def _find_stuck(self, now_s: float) -> None:
        limit_s = self._stuck_s()
        for device in self.view.members:
            health = self._health.get(device)
            if health is None or health.waits or now_s - health.moved_s <= limit_s:
                continue
            self._give_up(device, f"is stuck: it has not got on for {limit_s:.0f} s")

    def _stuck_s(self) -> float:
        known = [self._health[d] for d in self.view.members if d in self._health]
        return stuck_after_s(known, self.limit_s)

    def _give_up(self, device: int, why: str) -> None:
        line = self._lines.pop(device, None)
        if line is None:
            return
        self._drop(line)
        if device not in self._left:
            self.reasons.setdefault(device, why)
            self._deliver(self._council.suspect(device))

    def _drop(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        line.close()

    def _deliver(self, sends: Sends) -> None:
        for device, message in sends:
            self._say([device], ["council", words.written(message)])
        self._changed.notify_all()

    def _say(self, devices: list[int], message: Any) -> None:
        for device in devices:
            line = self._lines.get(device)
            if line is None:
                continue
            try:
                line.say(message)
                if line.is_behind:
                    both = selectors.EVENT_READ | selectors.EVENT_WRITE
                    self._selector.modify(line, both, line)
            except OSError as error:
                self._give_up(device, f"lost its connection: {error}")

    # ---- those who come later ------------------------------------------------------------

    def _greeted(self, line: Line, message: Any) -> int | None:
        """A stranger says hello: with the token it becomes a guest, or learns who is here."""
        device, address = self._door.greet(line, message)
        if device is None:
            self._given_ids += 1
            given = 1000 * (self.me + 1) + self._given_ids
            here = {str(d): self.addresses[d] for d in self.view.members if d in self.addresses}
            line.say(["here", given, here])
            return None
        if device in self._lines or device in self.view.members:
            raise LineError("a device of that number is here")
        self._door.forget(line)
        self._lines[device], self._health[device] = line, Health(time.monotonic())
        self.addresses[device] = address
        line.say(self._beat())
        return device

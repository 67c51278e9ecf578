"""Ear: lines to all other devices, and a small thread that listens to them.

The thread tells the others every second that this device lives, notices who is silent or stuck,
and holds council with the rest. It never computes and never waits, so a long convolution does not
look like death.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.members import words
from terrazzo.members.copies import in_copies
from terrazzo.members.council import Council, Seat, Sends
from terrazzo.members.guests import Guests, known
from terrazzo.members.health import BEAT_S, Health, Standstill, stuck_after_s
from terrazzo.members.line import Line, LineError
from terrazzo.members.strangers import Strangers, Wrap
from terrazzo.members.view import View

PATIENCE_S = 1.0
LEAST_FLOW_BYTES = 4096
"""What must be carried from beat to beat for that not to count as nothing."""

BROKEN = (OSError, ValueError, TypeError, LookupError, OverflowError)
"""What a connection that ends raises, and what is no message."""


class Ear:
    """Lines to all other devices, and the thread that listens to them."""

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
        wrap: Wrap,
    ) -> None:
        settled = tuple((device, 0) for device in view.members)
        self.me, self.token, self.limit_s = me, token, limit_s
        self.addresses = dict(addresses)
        self.done = self.entered = self.until = 0
        """Operations that are finished, begun, and through which one who came later is on
        probation."""
        self.is_waiting: Callable[[], bool] = lambda: False
        """Whether the main thread waits for others; told with every beat."""
        self.carried_bytes: Callable[[], int | None] = lambda: None
        """What its connections for data have carried so far; None: that cannot be told."""
        self.wake: Callable[[], None] = lambda: None
        """Breaks off whatever the main thread waits for."""
        self.see_off: Callable[[], bool] = lambda: False
        """Takes part in a change of members when the script has ended; whether that went well."""
        self.reach: Callable[[str], Line] = _nowhere
        """Opens a line to a member; where this device comes later."""
        self._rest: dict[int, str] = {}
        """Members that a guest was told of, and where they are."""
        self._asked_s = time.monotonic()
        self.reasons: dict[int, str] = {}
        """Why devices were given up, here or by another who told so."""
        self._council = Council(Seat(me, view, ready=settled, is_present=False))
        self._seen = self._council.seat
        self._lines = dict(lines)
        now_s = time.monotonic()
        self._health = {device: Health(now_s) for device in lines}
        self._guests = Guests(me)
        self._left: dict[int, str] = {}
        """Who has ended its script, and why; it goes when nobody needs it, and its line with it."""
        self._board: dict[tuple[int, str], bytes] = {}
        self._alarmed_s, self._waited = now_s, 0
        self._standstill, self._carried, self._flows = Standstill(now_s), 0, True
        self._closed = self._confers = False
        self._trouble: Exception | None = None
        """What has ended the thread; nothing is noticed any more."""
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(listener, self._selector, wrap)
        self._bell, self._rung = socket.socketpair()  # wakes the thread when it is to end
        self._selector.register(self._rung, selectors.EVENT_READ, None)
        for line in self._lines.values():
            self._selector.register(line, selectors.EVENT_READ, line)
        self._thread = threading.Thread(target=self._run, name="terrazzo members", daemon=True)
        self._thread.start()
        in_copies(self._forget)

    @property
    def view(self) -> View:
        return self._council.seat.view

    def called(self, device: int) -> str:
        """A device as people know it: by its number, and by its host's name where there is one."""
        name = "".join(self.addresses.get(device, "").split(" ")[2:3])
        is_plain = not name.isprintable() or name in ("", f"device{device}")
        return f"device {device}" if is_plain else f"device {device} ({name[:64]})"

    def sockets(self) -> list[int]:
        """The files of all its connections."""
        with self._changed:
            return [line.fileno() for line in (*self._lines.values(), *self._strangers.lines)]

    def _forget(self) -> None:
        """In a copy of this process: takes no lock, which a thread that is not here may hold."""
        self._closed = True
        for line in (*self._lines.values(), *self._strangers.lines):
            line.close()
        self._strangers.listener.close()

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # a fault of ours: the main thread and the others must know
            with self._changed:
                self._trouble, self._closed = error, True
                for line in self._lines.values():
                    self._drop(line)
                self._strangers.close()
                self._bell.close()
                self._rung.close()
                self._changed.notify_all()
            self.wake()

    def _listen(self) -> None:
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
                    self._look_at_flow()
                    self._say(list(self._lines), self._beat())
                    self._watch(now_s)
                self._changed.notify_all()
                self._wake_up(now_s)

    def _beat(self) -> list[Any]:
        return ["beat", self.entered, self._attends, self._flows]

    @property
    def _attends(self) -> bool:
        """Whether the main thread waits, for others or for the next view."""
        return self._confers or self.is_waiting()

    def _look_at_flow(self) -> None:
        """Once a beat; who does not wait need not ask."""
        carried = self.carried_bytes() if self.is_waiting() else None
        self._flows = carried is None or carried - self._carried >= LEAST_FLOW_BYTES
        self._carried = carried or 0

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
        late = any(why or device not in self._lines for device, why in self._left.items())
        if (seat.is_out and not before.is_out) or (late and self.is_waiting()):
            self.wake()

    def _attend(self, file: Any, line: Line | None, mask: int) -> None:
        if line is None:
            if file is self._strangers.listener:
                self._strangers.answer()
            return
        device = next((d for d, known in self._lines.items() if known is line), None)
        try:
            # What came is heeded before anything is sent: who has left may have said why.
            messages = line.hear() if mask & selectors.EVENT_READ else []
            if messages and device is not None:
                self._health[device].hear(time.monotonic())
            for message in messages:
                if device is None:
                    device = self._greeted(line, message)
                else:
                    self._heed(device, message)
            if mask & selectors.EVENT_WRITE and line.fileno() >= 0:
                self._selector.modify(line, selectors.EVENT_READ, line)
            if line.is_behind and line.fileno() >= 0:  # a handshake may have waited for what came
                line.push()
        except Exception as error:
            if device is None:  # a stranger: whatever it says must not disturb this device
                self._strangers.drop(line)
            elif not isinstance(error, BROKEN):
                raise
            elif device in self._lines:  # also where it says what is no message
                self._last_words(device, line)
                self._give_up(device, f"lost its connection: {error}")

    def _last_words(self, device: int, line: Line) -> None:
        """Who takes no more may have said why, and is not lost if it has ended its script."""
        with contextlib.suppress(*BROKEN):
            for message in line.hear():
                self._heed(device, message)

    def _heed(self, device: int, message: Any) -> None:
        """One message of a member or a guest."""
        if not isinstance(message, list) or not message:
            raise ValueError("no message")
        kind, *rest = message
        if kind == "beat":
            now_s = time.monotonic()
            entered, waits, flows = int(rest[0]), bool(rest[1]), bool(rest[2])
            self._health[device].beat(now_s, entered=entered, waits=waits, flows=flows)
        elif kind == "council":
            self._council.attend(self._attends)
            self._deliver(self._council.hear(device, words.read(rest[0])))
        elif kind == "post":
            self._board[int(rest[0]), str(rest[1])] = b64decode(rest[2])
        elif kind == "lost":
            self.reasons.setdefault(int(rest[0]), str(rest[1]))
        elif kind == "bye":
            why, first = str(rest[0]), int(rest[1])
            if why and first != self.me:  # it only follows: who failed first is named first
                self._left.setdefault(first, why)
            self._left[device] = why
        elif kind == "gone":
            self._give_up(device, str(rest[0]))
        elif kind == "join":
            self._guests.hear(device, [int(line) for line in rest[0]])
        elif kind == "here":
            self._rest |= {int(number): str(where) for number, where in rest[0].items()}
        else:
            raise ValueError(f"no message {kind!r}")

    def _watch(self, now_s: float) -> None:
        """Looks for who is silent or stuck, and whether patience is over."""
        seat = self._council.seat
        self._strangers.watch(now_s)
        if unready := self._guests.unready(seat.view.members) & set(self._lines):
            self._say(sorted(unready), ["here", known(self.addresses, seat.view.members)])
        for device, health in list(self._health.items()):
            if device in self._lines and health.is_silent(now_s):
                self._give_up(device, f"was silent for {now_s - health.heard_s:.1f} s")
        if self._attends and not seat.alarmed:
            self._find_stuck(now_s)
        self._find_standstill(now_s)
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

    def _find_standstill(self, now_s: float) -> None:
        """Whose connection has stalled nobody can tell: all connect anew."""
        seat = self._council.seat
        known = [self._health[d] for d in seat.view.members if d in self._health]
        still = self.is_waiting() and all(one.waits and not one.flows for one in known)
        still = still and bool(known) and not (self._flows or self._confers or seat.alarmed)
        entered = (self.entered, *(one.entered for one in known))
        if self._standstill.lasts_s(now_s, entered, still=still) > self._stuck_s():
            self._standstill = Standstill(now_s)
            self._deliver(self._council.alarm())

    def _stuck_s(self) -> float:
        known = [self._health[d] for d in self.view.members if d in self._health]
        return stuck_after_s(known, self.limit_s)

    def _give_up(self, device: int, why: str) -> None:
        line = self._lines.pop(device, None)
        if line is not None:
            self._drop(line)
        if device not in self._left and device not in self._council.seat.suspects:
            self.reasons[device] = why
            self._say(list(self._lines), ["lost", device, why])
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
                self._last_words(device, line)
                self._give_up(device, f"lost its connection: {error}")

    def _greeted(self, line: Line, message: Any) -> int | None:
        """A stranger says hello: with the token it becomes a guest, or learns who is here."""
        device, address = self._strangers.greeted(line, self.token, message)
        if device is None:
            here = known(self.addresses, self.view.members)
            line.say(["here", self._guests.number(), here])
            return None
        if device in self._lines or device in self.view.members:
            raise LineError("a device of that number is here")
        self._strangers.forget(line)
        self._lines[device], self._health[device] = line, Health(time.monotonic())
        self.addresses[device] = address
        line.say(self._beat())
        return device


def _nowhere(where: str) -> Line:
    raise LineError(f"{where}: only who comes later calls members")

"""Council: how the members of a view agree on the next one, as a pure state machine.

Messages in, messages out; no sockets, no clock. It is the single-decree Paxos, once for each epoch,
among the members of that epoch:

    working ──a device is suspected, or anybody says Alarm──▶ alarmed: no operation is finished here
    alarmed ──the first member nobody suspects, or anybody whose patience is over──▶ Prepare
    Prepare ──Promise of everybody who is not suspected, and they may go on──▶ Accept
    Accept  ──Accepted by members who may go on──▶ Decided, told to all
    Decided ──Ready of every member of the new view──▶ settled: they rebuild their links and go on

Two sets that may go on share a device, which promises to one proposal only, so an epoch has one
next view. Members are among those who promised, and who has promised finishes nothing any more: so
the counts of finished operations that come with Ready are final. The largest of them says what was
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from terrazzo.members.view import View, goes_on

Ballot = tuple[int, int]
"""A round and who asks: of two proposals one is always the later."""
Vote = tuple[Ballot, tuple[int, ...]]
NEVER: Ballot = (0, -1)


class Alarm(NamedTuple):
    epoch: int


class Prepare(NamedTuple):
    epoch: int
    ballot: Ballot


class Promise(NamedTuple):
    epoch: int
    ballot: Ballot
    accepted: Vote | None
    suspects: tuple[int, ...]
    attends: bool


class Accept(NamedTuple):
    epoch: int
    ballot: Ballot
    members: tuple[int, ...]


class Accepted(NamedTuple):
    epoch: int
    ballot: Ballot


class Decided(NamedTuple):
    view: View


class Ready(NamedTuple):
    """Its sender has stopped working in the old view, having finished so many operations."""

    epoch: int
    done: int


Message = Alarm | Prepare | Promise | Accept | Accepted | Decided | Ready
Sends = list[tuple[int, Message]]


class Seat(NamedTuple):
    """What one device knows."""

    me: int
    view: View
    suspects: frozenset[int] = frozenset()
    guests: frozenset[int] = frozenset()
    """Devices that are connected to all members and want to be among them."""
    is_present: bool = True
    """Whether the main thread takes part. One that hangs may vote, or others could never leave it
    behind, but proposes nothing: it would propose itself and leave out who has given it up."""
    attends: bool = True
    """Whether the main thread waits, for others or for the next view. Of two that cannot talk to
    each other the one that does not is the one that hangs, if one does."""
    alarmed: bool = False
    is_out: bool = False
    """The others went on without this device."""
    promised: Ballot = NEVER
    accepted: Vote | None = None
    ballot: Ballot | None = None
    """Of this device's own proposal."""
    promises: tuple[tuple[int, Promise], ...] = ()
    """Who promised, and what they said with it."""
    choice: tuple[int, ...] = ()
    accepts: frozenset[int] = frozenset()
    ready: tuple[tuple[int, int], ...] = ()

    @property
    def trusted(self) -> frozenset[int]:
        return frozenset(self.view.members) - self.suspects

    @property
    def is_stranded(self) -> bool:
        """Too few are left to go on."""
        return bool(self.view.members) and not goes_on(self.trusted, self.view)

    def shortage(self, reasons: Mapping[int, str], called: Callable[[int], str]) -> str:
        """Why this device cannot go on, in words; ``reasons`` tells why others were given up, and
        ``called`` what people call a device."""
        lost = sorted(self.suspects & set(self.view.members))
        names = ", ".join(f"{called(d)}: {reasons.get(d, 'lost')}" for d in lost)
        rule = "more than half must be left"
        if 2 * len(self.trusted) == len(self.view.members):
            rule += f", or half with {called(self.view.tie)}"
        return (
            f"{len(lost)} of {len(self.view.members)} devices are gone ({names}): {rule} to go on, "
            "so that no two groups do."
        )

    @property
    def committed(self) -> int | None:
        """How many operations are finished for all members of this view; None: not settled."""
        counts = dict(self.ready)
        settled = bool(self.view.members) and counts.keys() >= set(self.view.members)
        return max(counts[device] for device in self.view.members) if settled else None


class Council:
    """One device's part in it; ``seat`` is all its state, so that it can be copied."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._sends: Sends = []

    # ---- what may happen -----------------------------------------------------------------

    def suspect(self, device: int) -> Sends:
        """A device was found dead, silent or stuck."""
        seat = self.seat
        if device != seat.me:
            self._set(suspects=seat.suspects | {device}, guests=seat.guests - {device})
        if device in seat.view.members and device != seat.me:
            self._alarm()
            self._consider()
        return self._taken()

    def alarm(self) -> Sends:
        """Something broke, or somebody wants to join: members agree anew on who they are."""
        self._alarm()
        return self._taken()

    def invite(self, guest: int) -> Sends:
        """A device would like to belong to the next view."""
        if guest not in self.seat.view.members and guest not in self.seat.suspects:
            self._set(guests=self.seat.guests | {guest})
        return self._taken()

    def arrive(self, done: int) -> Sends:
        """This device works no more in the view before; it has finished so many operations."""
        message = Ready(self.seat.view.epoch, done)
        self._tell(self.seat.view.members, message)
        return self._taken()

    def wait_no_longer(self) -> Sends:
        """Patience is over: whatever was going on, this device proposes by itself."""
        if self.seat.alarmed and not self.seat.is_out and self.seat.is_present:
            self._propose()
        return self._taken()

    def appear(self, *, present: bool) -> Sends:
        """The main thread waits for the next view, or does so no longer."""
        self._set(is_present=present)
        self._consider()
        return self._taken()

    def attend(self, attends: bool) -> None:
        """What the main thread does now."""
        if attends != self.seat.attends:
            self._set(attends=attends)

    def hear(self, source: int, message: Message) -> Sends:
        if isinstance(message, Decided):
            self._learn(message.view)
        elif message.epoch < self.seat.view.epoch:
            if isinstance(message, (Prepare, Accept)):  # its sender is behind
                self._tell([source], Decided(self.seat.view))
        elif message.epoch == self.seat.view.epoch and not self.seat.is_out:
            getattr(self, f"_hear_{type(message).__name__.lower()}")(source, message)
        return self._taken()

    # ---- messages ------------------------------------------------------------------------

    def _hear_alarm(self, source: int, message: Alarm) -> None:
        self._alarm(told=True)

    def _hear_prepare(self, source: int, message: Prepare) -> None:
        self._alarm(told=True, propose=False)
        if message.ballot > self.seat.promised:
            self._set(promised=message.ballot)
            suspects = tuple(sorted(self.seat.suspects & set(self.seat.view.members)))
            said = (self.seat.accepted, suspects, self.seat.attends)
            self._tell([source], Promise(message.epoch, message.ballot, *said))

    def _hear_promise(self, source: int, message: Promise) -> None:
        if message.ballot == self.seat.ballot and not self.seat.choice:
            told = dict(self.seat.promises) | {source: message}
            self._set(promises=tuple(sorted(told.items())))
            self._consider()

    def _hear_accept(self, source: int, message: Accept) -> None:
        self._alarm(told=True, propose=False)
        if message.ballot >= self.seat.promised:
            vote = (message.ballot, message.members)
            self._set(promised=message.ballot, accepted=vote)
            self._tell([source], Accepted(message.epoch, message.ballot))

    def _hear_accepted(self, source: int, message: Accepted) -> None:
        if message.ballot == self.seat.ballot and self.seat.choice:
            self._set(accepts=self.seat.accepts | {source})
            if goes_on(self.seat.accepts, self.seat.view):
                self._learn(self.seat.view.next(self.seat.choice))

    def _hear_ready(self, source: int, message: Ready) -> None:
        known = dict(self.seat.ready) | {source: message.done}
        self._set(ready=tuple(sorted(known.items())))

    # ---- what follows from them ----------------------------------------------------------

    def _alarm(self, *, told: bool = False, propose: bool = True) -> None:
        """Who was told need not tell: should the one who told be lost, all will notice."""
        seat = self.seat
        if not seat.alarmed and not seat.is_out and seat.view.members:
            self._set(alarmed=True, ready=())
            if not told:
                self._tell(sorted(seat.trusted - {seat.me}), Alarm(seat.view.epoch))
            if propose and seat.is_present and min(self.seat.trusted) == seat.me:
                self._propose()

    def _propose(self) -> None:
        ballot = (self.seat.promised[0] + 1, self.seat.me)
        self._set(ballot=ballot, promises=(), choice=(), accepts=frozenset())
        self._tell(sorted(self.seat.trusted), Prepare(self.seat.view.epoch, ballot))

    def _consider(self) -> None:
        """Goes on with this device's proposal once everybody who is not suspected has promised."""
        seat = self.seat
        if not seat.alarmed or seat.is_out:
            return
        if seat.ballot is None:
            if seat.is_present and min(seat.trusted) == seat.me and seat.promised == NEVER:
                self._propose()  # those before this device are gone
            return
        promised = [device for device, _ in seat.promises]
        if seat.choice or not seat.trusted <= set(promised):
            return
        votes = [said.accepted for _, said in seat.promises if said.accepted is not None]
        group = _friends(seat)
        if votes and goes_on(promised, seat.view):
            self._set(choice=max(votes)[1])
        elif group:
            self._set(choice=tuple(sorted({*group, *seat.guests})))
        else:
            return
        self._tell(promised, Accept(seat.view.epoch, seat.ballot, self.seat.choice))

    def _learn(self, view: View) -> None:
        seat = self.seat
        if view.epoch <= seat.view.epoch or seat.is_out:
            return
        told = (set(view.members) | set(seat.view.members)) - {seat.me} - seat.suspects
        self._tell(sorted(told), Decided(view))
        if seat.me not in view.members:
            self._set(is_out=bool(seat.view.members))  # a guest may be let in later
            return
        self.seat = Seat(
            seat.me, view, seat.suspects, is_present=seat.is_present, attends=seat.attends
        )
        if seat.suspects & set(view.members):  # lost since it promised
            self._alarm()

    # ---- sending -------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:
        self.seat = self.seat._replace(**changes)

    def _tell(self, devices: Any, message: Message) -> None:
        own = False
        for device in devices:
            if device == self.seat.me:
                own = True
            else:
                self._sends.append((device, message))
        if own:
            self.hear_self(message)

    def hear_self(self, message: Message) -> None:
        """What a device tells itself it knows at once."""
        if not isinstance(message, Decided) and message.epoch == self.seat.view.epoch:
            getattr(self, f"_hear_{type(message).__name__.lower()}")(self.seat.me, message)

    def _taken(self) -> Sends:
        sends, self._sends = self._sends, []
        return sends


def _friends(seat: Seat) -> tuple[int, ...]:
    """The largest group of promisers who can all talk to each other and may go on; () if none.

    Of two as large, the one in which more attend: who gives up a device that hangs must not be left
    behind with it in its place.
    """
    doubts = {frozenset((one, other)) for one, said in seat.promises for other in said.suspects}
    doubts |= {frozenset((seat.me, other)) for other in seat.suspects}
    attending = {device for device, said in seat.promises if said.attends}
    here = sorted(seat.trusted)
    for size in range(len(here), 0, -1):
        groups = [
            group
            for group in combinations(here, size)
            if seat.me in group
            and goes_on(group, seat.view)
            and doubts.isdisjoint(map(frozenset, combinations(group, 2)))
        ]
        if groups:
            return max(groups, key=lambda group: len(attending.intersection(group)))
    return ()

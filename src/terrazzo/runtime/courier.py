"""Courier: a thread that carries what a device need not wait for while it computes.

Boxes too long for the room of a connection, and sums of weight gradients, are to travel while the
device computes. gloo has threads for that, but they wake up three times for a message and spin
while another thread holds the lock of a connection: an eighth of all processor time of a step on a
device with a tenth of a core. Here one thread sleeps until a good part of a message is there.

    post     a job joins the queue of its line, a wire of its own; the bell wakes the thread
    begin    its messages are handed to the connections
    advance  after every arrival: is there something to add up and send on, is it done?

Lines do not wait for each other. The jobs of one line come one after the other, on all of its
members in the same order.
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from terrazzo.runtime.end import End, WireError
from terrazzo.runtime.wire import Parcel, Wire, too_late

JOIN_S = 5.0
GRAIN = 1 << 15
"""Elements that are added at a time: torch takes no further threads for so few, and they stay in a
cache for all parts."""

T = TypeVar("T")


class Job(ABC):
    """Something under way. All but ``wait`` happens in the courier's thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: WireError | None = None
        self._ends: Sequence[End] = ()
        self.has_sent = False
        """Whether it has just handed something to all of its connections."""

    @abstractmethod
    def begin(self, wire: Wire) -> None: ...

    def advance(self) -> bool:
        """Goes on as far as it can; True when nothing is left to do."""
        return all(end.is_idle for end in self._ends)

    def end(self, error: WireError | None = None) -> None:
        self._error = error
        self._over.set()

    def wait(self, timeout_s: float) -> None:
        """Until it is done; raises what went wrong, or that it took too long."""
        if not self._over.wait(timeout_s):
            late = next((end.peer for end in self._ends if not end.is_idle), None)
            raise too_late(late, timeout_s)
        if self._error is not None:
            raise WireError(self._error.peer, str(self._error)) from self._error


class Carry(Job):
    """Messages, each from one device to another."""

    def __init__(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        super().__init__()
        self._sends, self._receives = sends, receives

    def begin(self, wire: Wire) -> None:
        self._ends = wire.begin(self._sends, self._receives)


class Sum(Job):
    """The sum of a tensor over all members of a wire, in place, and on all of them the same.

    Everybody adds up one piece of it, in order of members, and sends the result to everybody. That
    is as much to send as in a ring, in two rounds for any number of members.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor, self._added = tensor.view(-1), False

    def begin(self, wire: Wire) -> None:
        pieces = dict(zip(wire.members, self._tensor.tensor_split(len(wire.members)), strict=True))
        self._wire, self._own = wire, pieces.pop(wire.device)
        self._parts = {member: torch.empty_like(self._own) for member in pieces}
        # A result comes behind its sender's part, and not before our part of that piece has arrived
        # there: so nothing is overwritten here that is still to be sent.
        theirs = list(pieces.items())
        self._ends = wire.begin(theirs, [*self._parts.items(), *theirs])
        self._before = {end.peer: end.received for end in self._ends}

    def advance(self) -> bool:
        if not self._added and all(e.received > self._before[e.peer] for e in self._ends):
            self._add_up()
            self._wire.begin([(end.peer, self._own) for end in self._ends], ())
            self.has_sent = True
        return self._added and super().advance()

    def _add_up(self) -> None:
        first, *rest = (self._parts.get(member, self._own) for member in self._wire.members)
        total = first.clone()
        for low in range(0, total.numel(), GRAIN):
            some = slice(low, low + GRAIN)
            for part in rest:
                total[some].add_(part[some])
        self._own.copy_(total)
        self._parts, self._added = {}, True


def _parted() -> WireError:
    return WireError(None, "this device has left the others")


class Line:
    """A wire that only the courier uses, and the jobs that wait for it."""

    def __init__(self, courier: Courier, wire: Wire) -> None:
        self._courier, self._wire = courier, wire
        self._jobs: deque[Job] = deque()
        self._broken: WireError | None = None

    def carry(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Job:
        return self._courier.post(self, Carry(sends, receives))

    def sum(self, tensor: Tensor) -> Job:
        return self._courier.post(self, Sum(tensor))

    def close(self) -> None:
        self._wire.close()

    # ---- in the courier's thread ---------------------------------------------------------

    def take(self, job: Job) -> None:
        if self._broken is not None:
            job.end(self._broken)
            return
        self._jobs.append(job)
        if len(self._jobs) == 1:
            job.begin(self._wire)
            self._settle(self._wire.ends)

    def stir(self, end: End) -> None:
        """Something can leave from an end, or has come to it."""
        end.push()
        end.pull()
        self._settle((end,))

    def _settle(self, stirred: Sequence[End]) -> None:
        """After something has happened at some ends: ends what is done, begins what comes next."""
        while self._jobs and self._jobs[0].advance():
            self._jobs.popleft().end()
            stirred = self._wire.ends
            if self._jobs:
                self._jobs[0].begin(self._wire)
        if self._jobs and self._jobs[0].has_sent:
            self._jobs[0].has_sent, stirred = False, self._wire.ends
        self._courier.watch(self, stirred)

    def fail(self, error: WireError) -> None:
        self._broken = error
        self._courier.forget(self._wire.ends)
        while self._jobs:
            self._jobs.popleft().end(error)


class Courier:
    """The thread, which begins with the first job."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._posted: deque[tuple[Line, Job]] = deque()
        self._watched: dict[int, tuple[Line, End, int]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, line: Line, job: Job) -> Job:
        if self._closed:
            job.end(_parted())
            return job
        self._posted.append((line, job))
        os.eventfd_write(self._bell, 1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tz-courier", daemon=True)
            self._thread.start()
        return job

    def close(self) -> None:
        """Nothing is carried any more; what was under way fails."""
        self._closed = True
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join(JOIN_S)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._bell)

    # ---- in the thread -------------------------------------------------------------------

    def watch(self, line: Line, ends: Sequence[End]) -> None:
        """Wakes up for what these ends wait for, and for nothing else."""
        for end in ends:
            wants, known = end.wants(), self._watched.get(end.number)
            if wants and known is None:
                self._poll.register(end.number, wants)
            elif wants and known is not None and known[2] != wants:
                self._poll.modify(end.number, wants)
            if wants:
                self._watched[end.number] = (line, end, wants)
            elif known is not None:
                self.forget((end,))

    def forget(self, ends: Sequence[End]) -> None:
        for end in ends:
            if self._watched.pop(end.number, None) is not None:
                self._poll.unregister(end.number)

    def _run(self) -> None:
        while not self._closed:
            for number, _ in self._poll.poll():
                if number == self._bell:
                    self._take_posted()
                elif number in self._watched:
                    self._stir(*self._watched[number][:2])
        for line in {line for line, _, _ in self._watched.values()}:
            line.fail(_parted())
        while self._posted:
            self._posted.popleft()[1].end(_parted())

    # Names of what is taken end with these calls: a job that nobody waits for lets its tensors go.

    def _take_posted(self) -> None:
        os.eventfd_read(self._bell)
        while self._posted:
            line, job = self._posted.popleft()
            self._carefully(line, line.take, job)

    def _stir(self, line: Line, end: End) -> None:
        self._carefully(line, line.stir, end)

    @staticmethod
    def _carefully(line: Line, call: Callable[[T], None], what: T) -> None:
        """Whatever goes wrong on a line, such as too little memory, is told to those who wait."""
        try:
            call(what)
        except WireError as error:
            line.fail(error)
        except Exception as error:
            line.fail(WireError(None, f"carrying failed: {type(error).__name__}: {error}"))

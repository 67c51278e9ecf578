"""Pool: worker processes that make batches beside training, in whatever order they get done.

It knows nothing of epochs: tickets go in, what was made of them comes out. A worker is given two at
most, the one it is at and the next: the rest waits here for whoever is free first, and what is sent
can never fill a pipe whose other end waits to be heard itself. A worker that dies is replaced and
its tickets are made again; when a ticket has ended two of them, it is told so, with the sample it
was at.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from terrazzo.errors import DataError
from terrazzo.feed.arena import Arena
from terrazzo.feed.process import fork
from terrazzo.feed.task import Made, Recipe, Shelved, Task
from terrazzo.feed.trays import Trays
from terrazzo.feed.worker import NOBODY, Board, work

MOST_SEATS = 64
MOST_TICKETS = 2
"""At one worker."""
MOST_UNHEARD_BYTES = 64 << 10
"""A longer message is sent only to a worker that listens."""
LIVES = 2
"""A ticket that ends so many workers is not tried again."""
ENDING_S = 5.0
LEAST_WORKER_BYTES = 32 << 20


@dataclass
class Seat:
    """One worker, and what it has been given and not answered."""

    number: int
    process: Any
    line: Connection
    tasks: dict[int, tuple[Task, int | None]] = field(default_factory=dict)
    """By ticket, each with the tray on which it is served."""
    leaving: bool = False

    def takes(self, message_bytes: int) -> bool:
        """Whether it can be sent so much without waiting."""
        if not self.tasks:
            return True
        return len(self.tasks) < MOST_TICKETS and message_bytes <= MOST_UNHEARD_BYTES


@dataclass(frozen=True)
class Arrival:
    ticket: int
    worker: int
    made: Made
    copied_s: float = 0.0
    """How long this process took to take it over."""


class Pool:
    """Workers come and go while it runs."""

    def __init__(
        self,
        recipe: Recipe,
        arena: Arena | None,
        shelved: Callable[[Task], Shelved] = lambda task: task.shelved,
    ) -> None:
        """``shelved``: what is known of samples when their ticket is given to a worker."""
        self.recipe, self.arena, self.shelved = recipe, arena, shelved
        self.board, self.trays = Board(MOST_SEATS), Trays()
        self.died = 0
        """Workers that ended by themselves."""
        self._seats: list[Seat] = []
        self._waiting: deque[tuple[int, Task]] = deque()
        self._deaths = Counter[int]()
        self._late: list[Arrival] = []
        """Verdicts that came up while tickets were handed out."""

    @property
    def workers(self) -> int:
        return sum(not seat.leaving for seat in self._seats)

    @property
    def processes(self) -> list[int]:
        return [seat.process.pid for seat in self._seats]

    @property
    def at(self) -> list[tuple[int, int]]:
        """Workers that have something to do, and the samples they are at, as far as these have
        numbers."""
        found = [(seat.number, self.board.read(seat.number)) for seat in self._seats if seat.tasks]
        return [(worker, sample) for worker, sample in found if sample != NOBODY]

    @property
    def worker_bytes(self) -> int:
        """Memory that the largest worker does not share with the training process."""
        return max([LEAST_WORKER_BYTES, *(_own_bytes(process) for process in self.processes)])

    def resize(self, workers: int) -> None:
        """Now so many; who leaves finishes what it has been given."""
        while self.workers < min(workers, MOST_SEATS):
            self._seats.append(self._start())
        for seat in [seat for seat in self._seats if not seat.leaving][workers:]:
            seat.leaving = True
            self._dismiss(seat)
        self._hand_out()

    def _dismiss(self, seat: Seat) -> None:
        is_needed = self._waiting and not self.workers
        if seat.leaving and not seat.tasks and not is_needed:
            with contextlib.suppress(OSError):
                seat.line.send(None)
            seat.line.close()
            self._seats.remove(seat)
            seat.process.join(ENDING_S)
            if seat.process.is_alive():
                seat.process.kill()

    def _start(self) -> Seat:
        taken = {seat.number for seat in self._seats}
        number = next(n for n in range(MOST_SEATS) if n not in taken)
        line, far = Pipe()
        process = fork(
            work, far, self.recipe, self.arena, self.trays, self.board, number,
            name=f"terrazzo-feed-{number}", closes=[line, *(seat.line for seat in self._seats)],
        )  # fmt: skip
        far.close()
        return Seat(number, process, line)

    def give(self, ticket: int, task: Task) -> None:
        """To the worker with the least to do, as soon as it can take it."""
        self._waiting.append((ticket, task))
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._hand(*self._waiting[0]):
            pass

    def _hand(self, ticket: int, task: Task) -> bool:
        """Gives the first that waits to a worker; False: nobody can take it now."""
        staying = [seat for seat in self._seats if not seat.leaving] or self._seats
        if not any(seat.takes(0) for seat in staying):
            return False
        tray = self.trays.take()
        dressed = replace(task, shelved=self.shelved(task))
        message = bytes(ForkingPickler.dumps((ticket, tray, dressed)))
        free = [seat for seat in staying if seat.takes(len(message))]
        if not free:
            self.trays.put_back(tray)
            return False
        seat = min(free, key=lambda seat: (len(seat.tasks), seat.number))
        try:
            seat.line.send_bytes(message)
        except OSError:
            self.trays.put_back(tray)
            self._late += self._bury(seat)
            return True
        self._waiting.popleft()
        seat.tasks[ticket] = task, tray
        return True

    def take(self, timeout_s: float | None = None) -> Iterator[Arrival]:
        """What has arrived; waits for the first if there is nothing yet."""
        late, self._late = self._late, []
        yield from late
        if late:
            timeout_s = 0.0
        lines = {seat.line: seat for seat in self._seats if seat.tasks}
        if not lines:
            return
        for ready in wait(list(lines), timeout_s):
            seat = lines[ready]  # type: ignore[index]
            if seat in self._seats:  # else it was found dead while another's tickets were handed on
                yield from self._listen(seat)

    def _listen(self, seat: Seat) -> Iterator[Arrival]:
        began = time.perf_counter()
        try:
            ticket, made = ForkingPickler.loads(seat.line.recv_bytes())
        except (EOFError, OSError):  # the line ended, or memory that a dead worker shared is gone
            yield from self._bury(seat)
            return
        except Exception as error:  # it answers in the order in which it was asked
            ticket, made = next(iter(seat.tasks)), _unheard(error)
        _, tray = seat.tasks.pop(ticket)
        try:
            made.batch = self.trays.clear(made.batch, tray)
        except Exception as error:
            made = _unheard(error)
        self._deaths.pop(ticket, None)
        self._hand_out()
        self._dismiss(seat)
        yield Arrival(ticket, seat.number, made, time.perf_counter() - began)

    def _bury(self, seat: Seat) -> list[Arrival]:
        """A worker ended by itself: another one takes its place and its tickets."""
        self.died += 1
        seat.process.join(ENDING_S)
        if seat.process.is_alive():
            seat.process.kill()
            seat.process.join(ENDING_S)
        self._seats.remove(seat)
        seat.line.close()
        found: list[Arrival] = []
        again: list[tuple[int, Task]] = []
        for place, (ticket, (task, tray)) in enumerate(seat.tasks.items()):
            self.trays.put_back(tray)
            self._deaths[ticket] += place == 0  # it works on the first of them
            if self._deaths[ticket] >= LIVES:
                found.append(Arrival(ticket, seat.number, self._verdict(seat, task)))
            else:
                again.append((ticket, task))
        self._waiting.extendleft(reversed(again))
        if not seat.leaving or (self._waiting and not self._seats):
            self._seats.append(self._start())
            self._seats[-1].leaving = seat.leaving
        self._hand_out()
        return found

    def _verdict(self, seat: Seat, task: Task) -> Made:
        sample, code = self.board.read(seat.number), seat.process.exitcode or 0
        name = type(self.recipe.dataset).__name__
        where = (
            f"at sample {sample} of {name}" if sample != NOBODY else f"between samples of {name}"
        )
        how, remedy = f"ended itself with exit status {code}", "Read that sample alone to see why"
        if code < 0:
            how = f"was ended by {_signal(-code)}"
        if code == -signal.SIGKILL:
            remedy = (
                "Signal 9 is what too little memory looks like: fewer workers= or less cache= "
                "leave more of it"
            )
        return Made(
            error=DataError(
                f"a worker of the feed {how} {where}, like {LIVES - 1} before it. {remedy}"
            )
        )

    def clear(self) -> None:
        """Forgets what was given; what workers are at is thrown away, with them."""
        workers = self.workers
        self.close()
        self.resize(workers)

    def close(self) -> None:
        for seat in self._seats:
            seat.process.kill()
            seat.line.close()
            for _, tray in seat.tasks.values():
                self.trays.put_back(tray)
        for seat in self._seats:
            seat.process.join(ENDING_S)
        self._seats, self._late = [], []
        self._waiting.clear()
        self._deaths.clear()


def _unheard(error: Exception) -> Made:
    text = f"a batch could not be taken over from a worker: {type(error).__name__}: {error}"
    return Made(error=DataError(text))


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # one without a name
        return f"signal {number}"


def _own_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

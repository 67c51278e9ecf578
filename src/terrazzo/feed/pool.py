"""Pool: worker processes that make batches beside training, in whatever order they get done.

It knows nothing of epochs: tickets go in, what was made of them comes out. A worker that dies is
replaced and its tickets are made again; when a ticket has ended two of them, it is told so, with
the sample it was at.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from terrazzo.errors import DataError
from terrazzo.feed.arena import Arena
from terrazzo.feed.maker import Made, Recipe, Task
from terrazzo.feed.process import fork
from terrazzo.feed.trays import Trays
from terrazzo.feed.worker import NOBODY, Board, work

MOST_WORKERS = 64
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


@dataclass(frozen=True)
class Arrival:
    ticket: int
    worker: int
    made: Made
    copied_s: float = 0.0
    """How long this process took to take it over."""


class Pool:
    """Workers come and go while it runs."""

    def __init__(self, recipe: Recipe, arena: Arena | None) -> None:
        self.recipe, self.arena = recipe, arena
        self.board, self.trays = Board(MOST_WORKERS), Trays()
        self.died = 0
        """Workers that ended by themselves."""
        self._seats: list[Seat] = []
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
    def worker_bytes(self) -> int:
        """Memory that the largest worker does not share with the training process."""
        return max([LEAST_WORKER_BYTES, *(_own_bytes(process) for process in self.processes)])

    def resize(self, workers: int) -> None:
        """Now so many; who leaves finishes what it has been given."""
        while self.workers < min(workers, MOST_WORKERS):
            self._seats.append(self._start())
        for seat in [seat for seat in self._seats if not seat.leaving][workers:]:
            seat.leaving = True
            self._dismiss(seat)

    def _dismiss(self, seat: Seat) -> None:
        if seat.leaving and not seat.tasks:
            with contextlib.suppress(OSError):
                seat.line.send(None)
            seat.line.close()
            self._seats.remove(seat)
            seat.process.join(ENDING_S)
            if seat.process.is_alive():
                seat.process.kill()

    def _start(self) -> Seat:
        taken = {seat.number for seat in self._seats}
        number = next(n for n in range(MOST_WORKERS) if n not in taken)
        line, far = Pipe()
        process = fork(
            work, far, self.recipe, self.arena, self.trays, self.board, number,
            name=f"terrazzo-feed-{number}",
        )  # fmt: skip
        far.close()
        return Seat(number, process, line)

    def give(self, ticket: int, task: Task) -> None:
        """To the worker with the least to do."""
        while True:
            seat = min(
                (seat for seat in self._seats if not seat.leaving),
                key=lambda seat: (len(seat.tasks), seat.number),
            )
            tray = self.trays.take()
            try:
                seat.line.send((ticket, tray, task))
            except OSError:
                self.trays.put_back(tray)
                self._late += self._bury(seat)
                continue
            seat.tasks[ticket] = task, tray
            return

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
            yield from self._listen(seat)

    def _listen(self, seat: Seat) -> Iterator[Arrival]:
        began = time.perf_counter()
        try:
            ticket, made = seat.line.recv()
            made.batch = self.trays.clear(made.batch)
        except Exception:  # the line ended, or memory that a dead worker shared is gone
            yield from self._bury(seat)
            return
        self.trays.put_back(seat.tasks.pop(ticket)[1])
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
        if not seat.leaving or not self._seats:
            self._seats.append(self._start())
        first, found = True, []
        for ticket, (task, tray) in seat.tasks.items():
            self.trays.put_back(tray)
            self._deaths[ticket] += first  # it works on the first of them
            first = False
            if self._deaths[ticket] >= LIVES:
                found.append(Arrival(ticket, seat.number, self._verdict(seat, task)))
            else:
                self.give(ticket, task)
        return found

    def _verdict(self, seat: Seat, task: Task) -> Made:
        sample, code = self.board.read(seat.number), seat.process.exitcode
        how = f"was ended by signal {-code}" if (code or 0) < 0 else f"exited ({code})"
        what = f"at sample {sample}" if sample != NOBODY else "between two samples"
        return Made(
            error=DataError(
                f"a worker of the feed {how} {what} of {type(self.recipe.dataset).__name__}, and "
                f"so did {LIVES - 1} before it: signal 9 is what too little memory looks like; "
                "otherwise read that sample alone, in a process of its own"
            )
        )

    def clear(self) -> None:
        """Forgets what was given; what workers are at is thrown away, with them."""
        workers = self.workers
        self._end()
        self.resize(workers)

    def _end(self) -> None:
        for seat in self._seats:
            seat.process.kill()
            seat.line.close()
            for _, tray in seat.tasks.values():
                self.trays.put_back(tray)
        for seat in self._seats:
            seat.process.join(ENDING_S)
        self._seats, self._late = [], []

    def close(self) -> None:
        """For good."""
        self._end()
        self.trays.close()


def _own_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

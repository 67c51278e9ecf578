"""A crew: workers that play rounds of chaos at the same time, and share nothing while they do.

Each is a process with a server of forks of its own, and plays one round after the other. A lab is
named after the process that made it, and has its own namespaces and groups, so labs that are made
at the same moment do not meet; they share the machine's cores by quotas.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from chaos_case import Case
from chaos_forks import asked_of, server
from chaos_round import Outcome, Round

END_S = 60.0
"""For a worker to take down its lab when it is told to end."""


@dataclass(frozen=True)
class Setting:
    """How rounds are played, all alike."""

    right: Path
    """Where undisturbed runs are kept; who needs one first makes it."""
    in_lab: bool
    patience: float
    at_once: int
    throttled: bool
    library: Path | None
    """What processes of devices load first, so that their time of day can jump."""


class Crew:
    """Takes a round for each worker that is free, and gives what came of it."""

    def __init__(self, workers: dict[Connection, Any]) -> None:
        self._workers = workers
        self._free = list(workers)
        self._rounds: dict[Connection, int] = {}

    @classmethod
    @contextmanager
    def of(cls, setting: Setting) -> Iterator[Crew]:
        """Who ends, ends all: each takes down what it has made."""
        context, workers = multiprocessing.get_context("spawn"), {}
        try:
            for _ in range(setting.at_once):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(theirs, setting))
                worker.start()
                theirs.close()
                workers[ours] = worker
            yield cls(workers)
        finally:
            for worker in workers.values():
                worker.terminate()
            for worker in workers.values():
                worker.join(END_S)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def is_busy(self) -> bool:
        return bool(self._rounds)

    def play(self, number: int, case: Case) -> None:
        pipe = self._free.pop()
        pipe.send(case)
        self._rounds[pipe] = number

    def next(self, limit_s: float | None = None) -> tuple[int, Outcome] | None:
        """The number of a round that has ended, and what came of it; None: none did in time."""
        ended = wait(list(self._rounds), limit_s)
        pipe = next((one for one in ended if isinstance(one, Connection)), None)
        if pipe is None:
            return None
        number = self._rounds.pop(pipe)
        try:
            found = pipe.recv()
        except EOFError:
            return number, Outcome(wrong="the tool failed: a worker ended by itself")
        self._free.append(pipe)
        return number, found


def _work(pipe: Connection, setting: Setting) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # labs and disks go first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for rounds hears it, and ends all
    context = server(setting.library)
    while True:
        try:
            case = pipe.recv()
        except EOFError:  # nobody wants more
            return
        try:
            found = _played(case, context, setting)
        except Exception:
            found = Outcome(wrong=f"the tool failed: {traceback.format_exc()}")
        pipe.send(found)


def _played(case: Case, context: Any, setting: Setting) -> Outcome:
    share = 1 / setting.at_once if setting.throttled else None
    one = Round(case, context, in_lab=setting.in_lab, patience=setting.patience, share=share)
    return one.run(_right(case, context, setting.right))


def _right(case: Case, context: Any, folder: Path) -> Path:
    """What an undisturbed run has after every step: made once for all workers."""
    shelf = folder / case.recipe.name
    with (folder / f"{case.recipe.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shelf.exists():
            asked_of(context, "chaos_job:undisturbed", case.to_json(), shelf)
    return shelf

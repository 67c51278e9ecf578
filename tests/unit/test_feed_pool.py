"""The pool hands out little at a time, and tells what became of everything it was given."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from terrazzo.errors import DataError
from terrazzo.feed import passage
from terrazzo.feed.likeness import likeness
from terrazzo.feed.passage import FromWorker
from terrazzo.feed.pool import MOST_TICKETS, Pool
from terrazzo.feed.process import fork
from terrazzo.feed.source import Options, Source
from terrazzo.feed.task import Made, Recipe, Shelved, Task

sys.path.insert(0, str(Path(__file__).parent))
from pictures import SIZE, Numbers, flat

Make = Callable[[Any], Pool]


@pytest.fixture
def pool() -> Iterator[Make]:
    made: list[Pool] = []

    def make(dataset: Any) -> Pool:
        made.append(Pool(Recipe(dataset, lambda rows: rows), None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def all_of(pool: Pool, count: int) -> dict[int, Made]:
    found: dict[int, Made] = {}
    end_s = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end_s:
        found |= {arrival.ticket: arrival.made for arrival in pool.take(1.0)}
    return found


class Wordy(Numbers):
    """Its samples are long, and no tensors."""

    def __getitem__(self, index: int) -> Any:
        return "x" * 100_000


def test_two_full_pipes_do_not_wait_for_each_other(pool: Make) -> None:
    workers = pool(Wordy(count=1 << 20))
    workers.trays._free.clear()  # what they make goes through the pipe
    workers.resize(1)

    def give() -> None:
        for ticket in range(6):
            workers.give(ticket, Task([ticket] * 4, shelved=Shelved(key=bytes(150_000))))

    giver = threading.Thread(target=give, daemon=True)
    giver.start()
    giver.join(30)
    assert not giver.is_alive(), "giving does not wait for a worker that waits to be heard"
    found = all_of(workers, 6)
    assert [len(found[ticket].batch) for ticket in range(6)] == [4] * 6


class Uneven(Numbers):
    """One of its samples takes until somebody lets it go on."""

    def __init__(self, gate: int) -> None:
        super().__init__()
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            os.read(self.gate, 1)
        return index


def test_what_a_slow_worker_has_not_begun_is_made_by_others(pool: Make) -> None:
    gate, opens = os.pipe()
    workers = pool(Uneven(gate))
    workers.resize(2)
    for ticket in range(10):
        workers.give(ticket, Task([ticket]))
    assert max(len(seat.tasks) for seat in workers._seats) <= MOST_TICKETS
    found = all_of(workers, 10 - MOST_TICKETS)
    assert 0 not in found
    assert len(found) == 10 - MOST_TICKETS, "but for what it had already been given"
    os.write(opens, b"x")
    assert len(found | all_of(workers, MOST_TICKETS)) == 10
    os.close(gate)
    os.close(opens)


class Refuses:
    """Can be sent, but not received."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise ValueError("not here")


class Odd(Numbers):
    def __getitem__(self, index: int) -> Any:
        return Refuses() if index == 3 else index


def test_what_cannot_be_taken_over_costs_no_worker(pool: Make) -> None:
    workers = pool(Odd())
    workers.resize(1)
    for ticket in range(5):
        workers.give(ticket, Task([ticket]))
    found = all_of(workers, 5)
    assert "ValueError: not here" in str(found[3].error)
    assert [found[ticket].batch for ticket in (0, 1, 2, 4)] == [[0], [1], [2], [4]]
    assert workers.died == 0


def test_who_leaves_finishes_what_waits(pool: Make) -> None:
    workers = pool(Numbers())
    workers.resize(1)
    for ticket in range(6):
        workers.give(ticket, Task([ticket]))
    workers.resize(0)
    assert len(all_of(workers, 6)) == 6
    assert not workers.processes


@pytest.mark.parametrize("count", [3, 6])
def test_workers_that_die_as_they_leave_leave_nothing_undone(pool: Make, count: int) -> None:
    gate, opens = os.pipe()
    workers = pool(Uneven(gate))
    workers.resize(2)
    for ticket in range(count):
        workers.give(ticket, Task([ticket]))
    workers.resize(0)
    for process in workers.processes:
        os.kill(process, 9)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # the dying would still read
    os.write(opens, b"x")
    found = all_of(workers, count)
    assert [found[ticket].batch for ticket in range(count)] == [[n] for n in range(count)]
    os.close(gate)
    os.close(opens)


class Buggy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return self._crop(index)

    def _crop(self, index: int) -> Any:
        return torch.zeros(3)[index + 5]


def test_an_error_of_a_worker_says_where_it_was() -> None:
    with pytest.raises(DataError, match="sample 0 of Buggy") as caught:
        list(Source(DataLoader(Buggy(), batch_size=4), Options(workers=1)))
    assert isinstance(caught.value.__cause__, FromWorker)
    assert "in _crop" in str(caught.value.__cause__)


def test_a_worker_that_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passage, "LONG_S", 0.1)
    monkeypatch.setattr(passage, "LONG", 0)
    gate, opens = os.pipe()

    class Patient(Source):
        def tell_late(self, waited_s: float) -> None:
            super().tell_late(waited_s)
            if self.pool is not None and self.pool.at:
                os.write(opens, b"x")

    source = Patient(DataLoader(Uneven(gate), batch_size=4), Options(workers=1))
    assert len(flat([[batch] for batch in source])) == -(-SIZE // 4)
    assert "for a batch of Uneven: worker 0 is at sample 0" in capfd.readouterr().err
    os.close(gate)
    os.close(opens)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_outlives_the_thread_that_began_it_and_not_its_parent() -> None:
    told, mine = os.pipe()
    child = os.fork()
    if child == 0:

        def live() -> None:
            os.write(mine, b"here ")
            time.sleep(60)

        began: list[Any] = []
        thread = threading.Thread(target=lambda: began.append(fork(live, name="test")))
        thread.start()
        thread.join()
        began[0].join(0.5)
        os.write(mine, b"alive" if began[0].is_alive() else b"ended")
        signal.pause()
    os.close(mine)
    found = b""
    while len(found) < len(b"here alive"):
        found += os.read(told, 100)
    assert found == b"here alive"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.read(told, 1) == b"", "the last who could write is gone"
    os.close(told)


def test_a_data_set_of_inference_tensors_can_be_looked_at() -> None:
    data = Numbers()
    with torch.inference_mode():
        data.table = torch.arange(4)  # type: ignore[attr-defined]
    before = likeness(data)
    assert likeness(data) == before
    data.scale = 2.0
    assert likeness(data) != before


def test_a_path_that_is_used_has_not_changed() -> None:
    data = Numbers()
    data.paths = [Path("a") / f"{number}.jpg" for number in range(40)]  # type: ignore[attr-defined]
    before = likeness(data)
    for path in data.paths:  # type: ignore[attr-defined]
        str(path)
    assert likeness(data) == before
    data.paths[0] = Path("b")  # type: ignore[attr-defined]
    assert likeness(data) != before

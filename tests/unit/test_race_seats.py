"""Where a peer's processes sit: on all devices or on one, one in each or several."""

from __future__ import annotations

import sys

from terrazzo.bench.seats import Seats
from terrazzo.cluster import launch
from terrazzo.cluster.hosts import LocalHosts

CODE = "import os; print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')))"


def said(seats: Seats) -> dict[int, str]:
    lines: dict[int, str] = {}
    result = launch(
        [sys.executable, "-S", "-c", CODE],
        seats,
        env={"OMP_NUM_THREADS": "3"},
        output=lambda device, line: lines.update({device: line}),
    )
    assert result.ok
    return lines


def test_several_processes_in_each_device() -> None:
    seats = Seats(LocalHosts(2), range(2), processes=2)
    assert seats.places == (0, 0, 1, 1)
    assert seats.names == ("device0.0", "device0.1", "device1.0", "device1.1")
    assert said(seats) == {rank: f"{rank} 4 3" for rank in range(4)}


def test_one_who_works_alone_is_the_first_of_one() -> None:
    seats = Seats(LocalHosts(3), [2])
    assert seats.names == ("device2",)
    assert said(seats) == {0: "0 1 3"}


def test_who_fails_is_called_by_its_seat() -> None:
    seats = Seats(LocalHosts(2), range(2), processes=2)
    code = "import os; raise SystemExit(os.environ['RANK'] == '3')"
    result = launch([sys.executable, "-S", "-c", code], seats, output=lambda *_: None)
    assert result.statuses == (0, 0, 0, 1)
    assert result.failure is not None
    assert result.failure.name == "device1.1"

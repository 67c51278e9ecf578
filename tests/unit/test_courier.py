"""The courier: what travels while a device computes, and what comes of it when somebody leaves."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from terrazzo.runtime.courier import Courier, Job, Line
from terrazzo.runtime.end import WireError
from terrazzo.runtime.wire import Wire, window_bytes

WAIT_S = 20.0
ADDRESS = (socket.AF_INET, "127.0.0.1")
OPEN: list[Courier | Line] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def lines(members: tuple[int, ...], couriers: dict[int, Courier], name: str = "a") -> list[Line]:
    """A line between some devices, one end each."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=WAIT_S))

    def make(device: int) -> Line:
        wire = Wire(PrefixStore(name, store), device, members, address=ADDRESS, timeout_s=WAIT_S)
        return Line(couriers[device], wire)

    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(make, members))
    OPEN.extend(found)
    return found


def hired(*devices: int) -> dict[int, Courier]:
    found = {device: Courier() for device in devices}
    OPEN[:0] = found.values()  # closed last, as lines are closed by their owners
    return found


def waited(jobs: list[Job]) -> None:
    for job in jobs:
        job.wait(WAIT_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 1001, 300_000])
def test_sums_are_those_of_the_order_of_devices_on_all_of_them(
    size: int, dtype: torch.dtype
) -> None:
    members = (0, 2, 5)
    found = lines(members, hired(*members))
    parts = [
        torch.randn(size, generator=torch.Generator().manual_seed(m)).to(dtype) for m in members
    ]
    expected = parts[0] + parts[1] + parts[2]
    tensors = [part.clone() for part in parts]
    waited([line.sum(tensor) for line, tensor in zip(found, tensors, strict=True)])
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_many_sums_and_two_circles_come_one_after_the_other_whatever_their_order() -> None:
    couriers = hired(0, 1, 2)
    everybody, pair = lines((0, 1, 2), couriers), lines((0, 2), couriers, "b")
    shared = [[torch.full((50_000,), float(m + 10 * k)) for k in range(6)] for m in range(3)]
    apart = [torch.full((70_000,), float(m)) for m in (0, 2)]
    jobs = [pair[0].sum(apart[0])]  # the other end of the pair comes to it last
    for k in range(6):
        jobs += [line.sum(shared[m][k]) for m, line in enumerate(everybody)]
    jobs.append(pair[1].sum(apart[1]))
    waited(jobs)
    for k in range(6):
        assert all((tensors[k] == 3.0 + 30 * k).all() for tensors in shared)
    assert all((tensor == 2.0).all() for tensor in apart)


def test_long_messages_travel_while_nobody_looks() -> None:
    first, second = lines((0, 1), hired(0, 1))
    size = 40 * window_bytes(2)
    sent, got = torch.randn(size), torch.empty(size)
    jobs = [first.carry([(1, sent)], []), second.carry([], [(0, got)])]
    until(lambda: all(job._over.is_set() for job in jobs))
    assert torch.equal(sent, got)


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_who_leaves_is_named_to_all_that_wait_and_to_all_that_come_later() -> None:
    first, second, third = lines((0, 1, 2), hired(0, 1, 2))
    third.close()
    jobs = [first.sum(torch.ones(10)), first.sum(torch.ones(10))]
    for job in (*jobs, first.sum(torch.ones(10))):
        with pytest.raises(WireError, match=r"closed|reset|Broken") as caught:
            job.wait(WAIT_S)
        assert caught.value.peer == 2
    second.close()


def test_a_silent_device_is_named_after_the_timeout() -> None:
    first, _ = lines((0, 1), hired(0, 1))
    with pytest.raises(WireError, match=r"Timed out waiting 0\.2 s") as caught:
        first.sum(torch.ones(10)).wait(0.2)
    assert caught.value.peer == 1


def test_what_is_under_way_fails_when_the_courier_goes() -> None:
    couriers = hired(0, 1)
    first, _ = lines((0, 1), couriers)
    job = first.sum(torch.ones(10))
    until(lambda: bool(first._jobs))
    OPEN.remove(couriers[0])
    couriers[0].close()
    with pytest.raises(WireError, match="left the others"):
        job.wait(WAIT_S)


def test_whatever_else_goes_wrong_is_told_to_who_waits() -> None:
    first, _ = lines((0, 1), hired(0, 1))
    with pytest.raises(WireError, match="carrying failed: KeyError: 7"):
        first.carry([(7, torch.ones(1))], []).wait(WAIT_S)


def test_what_comes_after_it_was_closed_fails_at_once() -> None:
    couriers = hired(0, 1)
    one, _ = lines((0, 1), couriers)
    couriers[0].close()
    OPEN.remove(couriers[0])
    with pytest.raises(WireError, match="has left the others"):
        one.sum(torch.ones(3)).wait(WAIT_S)


def test_a_job_that_is_done_lets_its_tensors_go() -> None:
    ends = lines((0, 1), hired(0, 1))
    tensors = [torch.ones(1000) for _ in ends]
    waited([end.sum(tensor) for end, tensor in zip(ends, tensors, strict=True)])
    left = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    end_s = time.monotonic() + WAIT_S
    while any(one() is not None for one in left) and time.monotonic() < end_s:
        time.sleep(0.01)  # the thread leaves its last call a moment after the waiter woke up
    assert [one() for one in left] == [None, None]

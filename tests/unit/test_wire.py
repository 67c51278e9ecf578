"""Plain connections between devices, here between threads of one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from terrazzo.members import hello
from terrazzo.runtime.end import WireError
from terrazzo.runtime.wire import Parcel, Wire, window_bytes

ADDRESS = (socket.AF_INET, "127.0.0.1")


OPEN: list[Wire] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def wires(count: int, timeout_s: float = 20.0) -> list[Wire]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(count) as pool:
        made = [
            pool.submit(Wire, store, device, range(count), address=ADDRESS, timeout_s=timeout_s)
            for device in range(count)
        ]
        found = [one.result() for one in made]
    OPEN.extend(found)
    return found


def talked(
    wire: Wire,
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    begun = wire.begin(sends, receives)
    meanwhile()
    wire.end(begun)


def together(*calls: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def test_far_more_than_connections_hold_passes_both_ways_at_once() -> None:
    size = 8 * window_bytes(3)
    found = wires(3)
    sent = [torch.randn(size) for _ in range(3)]
    got = [[torch.empty(size) for _ in range(3)] for _ in range(3)]

    def talk(device: int) -> Callable[[], None]:
        others = [peer for peer in range(3) if peer != device]
        return lambda: talked(
            found[device],
            [(peer, sent[device]) for peer in others],
            [(peer, got[device][peer]) for peer in others],
        )

    together(*map(talk, range(3)))
    for device in range(3):
        for peer in range(3):
            if peer != device:
                assert torch.equal(got[device][peer], sent[peer])


def test_several_parcels_arrive_in_order_whatever_happens_meanwhile() -> None:
    first, second = wires(2)
    parcels = [torch.arange(n, dtype=torch.int64) for n in (1, 0, 5000, 3)]
    got = [torch.empty_like(parcel) for parcel in parcels]
    did: list[str] = []
    together(
        lambda: talked(first, [(1, p) for p in parcels], [], meanwhile=lambda: did.append("first")),
        lambda: talked(second, [], [(0, p) for p in got], meanwhile=lambda: did.append("second")),
    )
    assert sorted(did) == ["first", "second"]
    assert all(map(torch.equal, parcels, got))


def test_devices_out_of_step_are_found_out() -> None:
    first, second = wires(2)
    talked(first, [(1, torch.zeros(4))], [])
    with pytest.raises(WireError, match="out of step: expected message 0 of 8 bytes") as caught:
        talked(second, [], [(0, torch.empty(2))])
    assert caught.value.peer == 0


def test_a_device_that_left_is_named() -> None:
    first, _, third = wires(3)
    third.close()
    with pytest.raises(WireError, match=r"closed|reset") as caught:
        talked(first, [], [(1, torch.empty(1)), (2, torch.empty(1))])
    assert caught.value.peer == 2


@pytest.mark.timeout(60)
def test_a_short_row_behind_a_long_box_wakes_who_waits_for_it() -> None:
    """For a long one it was to be woken up only when much of it is there; else the row would be
    found when time is over."""
    first, second = wires(2, timeout_s=600.0)
    box, got, rows = torch.ones(1 << 16), torch.empty(1 << 16), []
    waiting = threading.Event()

    def waits() -> None:
        begun = first.begin([], [(1, got)])
        first.ends[0].wants()  # as where it has to wait for the box
        waiting.set()
        first.end(begun)
        rows.append(first.gather(torch.ones(1)))

    def comes_late() -> None:
        waiting.wait()
        talked(second, [(0, box)], [])
        time.sleep(0.3)
        rows.append(second.gather(torch.ones(1)))

    together(waits, comes_late)
    assert torch.equal(got, box) and len(rows) == 2


def test_who_waits_for_a_row_names_a_silent_device_after_the_timeout() -> None:
    first, _ = wires(2, timeout_s=0.3)
    with pytest.raises(WireError, match=r"Timed out waiting 0\.3 s") as caught:
        first.gather(torch.zeros(1))
    assert caught.value.peer == 1


def test_a_silent_device_is_named_after_the_timeout() -> None:
    first, _ = wires(2, timeout_s=0.3)
    with pytest.raises(WireError, match=r"Timed out waiting 0\.3 s") as caught:
        talked(first, [], [(1, torch.empty(1))])
    assert caught.value.peer == 1


def test_a_stranger_who_calls_is_sent_away() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Wire, store, 0, range(2), address=ADDRESS, timeout_s=20.0)
        host, port, _ = store.get("terrazzo/wire/0").decode().split()
        with socket.create_connection((host, int(port))) as stranger:
            assert len(stranger.recv(100)) == hello.NONCE_BYTES
            stranger.sendall(hello.CLAIM.pack(b"0" * 16, 1, b"0" * 32))
            assert stranger.recv(1) == b""
        second = pool.submit(Wire, store, 1, range(2), address=ADDRESS, timeout_s=20.0)
        one, other = first.result(), second.result()
    OPEN.extend([one, other])
    got = torch.empty(3)
    together(lambda: talked(one, [(1, torch.ones(3))], []), lambda: talked(other, [], [(0, got)]))
    assert torch.equal(got, torch.ones(3))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", [3, 70_000])
@pytest.mark.parametrize("under_way", [0, 9, 100_000])
def test_what_is_combined_is_the_same_on_all_also_while_boxes_travel(
    count: int, size: int, under_way: int
) -> None:
    """In more rounds than there are devices, so that each of them makes it for all once."""
    found, rounds = wires(count), count + 2
    parts = torch.randn(rounds, count, size)
    boxes = torch.randn(count, count, under_way)
    got, answers = torch.zeros_like(boxes), torch.zeros(count, rounds, size)
    did: list[int] = []

    def talk(device: int) -> None:
        wire = found[device]
        others = [peer for peer in range(count) if peer != device]
        for turn in range(rounds):
            begun = wire.begin(
                [(peer, boxes[device, peer]) for peer in others] if under_way else [],
                [(peer, got[device, peer]) for peer in others] if under_way else [],
            )
            answers[device, turn] = wire.combine(
                parts[turn, device], lambda rows: rows.sum(0), meanwhile=lambda: did.append(device)
            )
            wire.end(begun)

    together(*(partial(talk, device) for device in range(count)))
    for device in range(count):
        assert torch.equal(answers[device], parts.sum(1))
        for peer in set(range(count)) - {device} if under_way else ():
            assert torch.equal(got[device, peer], boxes[peer, device])
    assert sorted(did) == sorted([*range(count)] * rounds)


def test_who_is_lost_while_another_combines_is_named_by_that_one() -> None:
    first, *others, last = wires(4)
    last.close()
    with pytest.raises(WireError, match=r"closed|reset") as caught:
        together(
            lambda: first.combine(torch.zeros(1), lambda rows: rows.sum(0)) and None,
            *(lambda wire=wire: wire.begin([(0, torch.zeros(1))], []) and None for wire in others),
        )
    assert caught.value.peer == 3

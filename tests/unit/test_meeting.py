"""Members meet over lines: both ends prove that they know the token, and neither sends it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from terrazzo.errors import PeerLost
from terrazzo.members.control import INTERRUPTED, Control, Interrupted
from terrazzo.members.hello import Challenge
from terrazzo.members.line import HEAD
from terrazzo.members.meeting import Family, call, come_later, heard, meet, tell, unwrapped
from terrazzo.members.strangers import MOST_STRANGERS
from terrazzo.runtime.links import Links
from terrazzo.runtime.sockets import identities

TOKEN = "9f" * 16


def test_who_knows_the_token_is_let_in_without_sending_it() -> None:
    listener = Challenge()
    asked = json.loads(json.dumps(listener.asks))
    claim = Challenge.read(asked).claim(TOKEN, 3, "10.0.0.7 5000")
    device, address, proof = listener.check(TOKEN, json.loads(json.dumps(claim)))
    assert (device, address) == (3, "10.0.0.7 5000")
    Challenge.read(asked).confirm(TOKEN, claim, proof)
    assert TOKEN not in json.dumps([asked, claim, proof])


@pytest.mark.parametrize("changed", range(1, 5))
def test_another_number_device_address_or_proof_is_refused(changed: int) -> None:
    listener = Challenge()
    claim = listener.claim(TOKEN, 3, "10.0.0.7 5000")
    claim[changed] = {1: "0" * 32, 2: 4, 3: "10.0.0.8 5000", 4: "0" * 64}[changed]
    with pytest.raises(OSError, match="stranger"):
        listener.check(TOKEN, claim)


def test_what_was_heard_once_opens_nothing_later() -> None:
    claim = Challenge().claim(TOKEN, 3, "")
    with pytest.raises(OSError, match="stranger"):
        Challenge().check(TOKEN, claim)


def test_a_listener_that_does_not_know_the_token_is_found_out() -> None:
    challenge = Challenge()
    claim = challenge.claim(TOKEN, 3, "")
    proof = challenge.check(TOKEN, claim)[2]
    with pytest.raises(OSError, match="secret"):
        challenge.confirm(TOKEN, claim, ["proof", proof[1][:-1] + "x"])


def two(strangers: Sequence[bytes] = ()) -> tuple[list[Control], dict[str, str]]:
    return met(2, strangers)


def met(count: int, strangers: Sequence[bytes] = ()) -> tuple[list[Control], dict[str, str]]:
    """Members that have met; and what they put where all can read it.

    ``strangers`` say this to device 0 before device 1 comes.
    """
    told: dict[str, str] = {}
    there = threading.Condition()

    def put(key: str, value: str) -> None:
        with there:
            told[key] = value
            there.notify_all()

    def get(key: str) -> str:
        with there:
            assert there.wait_for(lambda: key in told, 20)
            return told[key]

    found: list[Any] = [None] * count

    def begin(me: int) -> None:
        at = (Family.AF_INET, "127.0.0.1")
        if me == 1:
            host, port = get("at 0").split()
            for data in strangers:
                with socket.create_connection((host, int(port)), timeout=10) as stranger:
                    stranger.sendall(data)
        found[me] = meet(me, count, at=at, put=put, get=get, tie=0, limit_s=20)

    threads = [threading.Thread(target=begin, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, told


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:  # what was sent was not even read
        return True


GARBAGE: list[bytes] = [
    b"GET / HTTP/1.1\r\n\r\n" * 4,
    HEAD.pack(1 << 30),
    HEAD.pack(1) + b"7",
    HEAD.pack(16) + b'["hello",1,2,3,]',
    HEAD.pack(18) + b'["hello",1,2,3,[]]',
    HEAD.pack(29) + b'["hello","x",Infinity,"","x"]',
    HEAD.pack(100_000) + b"[" * 100_000,
]


def test_strangers_get_nowhere_and_disturb_nothing() -> None:
    members, told = two()
    host, port = told["at 0"].split()
    for data in GARBAGE:
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(data)
            heard(stranger)  # a number drawn at random, which tells nothing
            assert is_hung_up(stranger), data[:40]
    with pytest.raises(OSError, match=r"closed|reset"):
        call(told["at 0"], (7, ""), token="00" * 16, timeout_s=10, wrap=unwrapped)
    with socket.create_connection((host, int(port)), timeout=10) as silent:
        later = come_later([told["at 0"]], token=told["token"], limit_s=10)
        tell(silent, ["hello"])
    assert [len(one.view.members) for one in members] == [2, 2]
    for one in (later, *members):
        one.leave("the test is over")


def leave(*members: Control) -> None:
    threads = [threading.Thread(target=one.leave) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


def test_strangers_do_not_disturb_a_meeting() -> None:
    members, _ = two([data for data in GARBAGE if data[:3] != b"GET"])
    assert [one.view.members for one in members] == [(0, 1), (0, 1)]
    leave(*members)


def test_a_flood_of_strangers_is_bounded_and_the_oldest_make_room() -> None:
    members, told = two()
    host, port = told["at 0"].split()
    flood = [
        socket.create_connection((host, int(port)), timeout=10) for _ in range(MOST_STRANGERS + 3)
    ]
    for stranger in flood:
        heard(stranger)
    assert [is_hung_up(stranger) for stranger in flood[:3]] == [True] * 3
    flood[3].settimeout(0.2)
    with pytest.raises(TimeoutError):
        flood[3].recv(1)
    for stranger in flood:
        stranger.close()
    leave(*members)


def test_a_thread_that_ended_is_an_error_and_no_silence() -> None:
    members, _ = two()

    def broken() -> bool:
        raise AssertionError("a fault of ours")

    members[0].is_waiting = broken  # asked at the next beat
    with pytest.raises(PeerLost, match="a fault of ours"):
        members[0].next_view(0)
    with pytest.raises(PeerLost, match="hears the others no more"):
        members[0].check(0)
    with members[1]._changed:
        assert members[1]._changed.wait_for(lambda: members[1].is_left_behind, 10)  # 0 has the tie
    leave(members[1])


def test_hanging_up_links_leaves_lines_alone() -> None:
    """A guest's line is accepted while links are made: at the next loss it must not break."""
    members, _ = two()
    links = Links()
    links.control, links.sockets = members[0], identities(members[0].sockets())
    assert links.sockets
    links.hang_up()
    members[0].post(0, "word", b"still here")
    assert members[1].look(0, "word", 10) == b"still here"
    leave(*members)


def test_a_forked_worker_does_not_hold_the_lines_of_who_was_killed() -> None:
    """The others would wait for a silence, and for as long as the worker lives."""
    members, _ = two()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are not copied
        worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        with members[1]._changed:  # as the system does for a process that is killed
            for line in members[1]._lines.values():
                members[1]._selector.unregister(line)
                line.close()
        assert wait_until(lambda: 1 in members[0].reasons)
        assert members[0].reasons[1] == "lost its connection: connection closed"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    leave(*members)


def test_who_has_said_goodbye_is_not_lost_to_one_who_hears_it_late() -> None:
    """It may find out by what it says itself, before it has read what was said to it."""
    members, _ = two()
    late, gone = members[0], members[1]
    with late._changed:  # its thread gets no turn
        with gone._changed:
            gone._say([0], ["bye", "", 1])
            late._lines[1].say(late._beat())
            time.sleep(0.05)
            gone._drop(gone._lines.pop(0))
        time.sleep(0.05)
        for _ in range(3):  # the first may still leave
            late._say([1], late._beat())
        assert 1 not in late._lines
        assert late._left == {1: ""}
        assert not late.reasons
    leave(*members)


def test_a_goodbye_counts_though_something_is_left_to_send_to_who_said_it() -> None:
    members, _ = two()
    late, gone = members[0], members[1]
    with late._changed:
        line = late._lines[1]
        with gone._changed:
            gone._say([0], ["bye", "", 1])
            line.say(late._beat())
            time.sleep(0.05)
            gone._drop(gone._lines.pop(0))
        time.sleep(0.05)
        line._leaving += b"more than the system took"
        late._attend(line.socket, line, selectors.EVENT_READ | selectors.EVENT_WRITE)
        assert late._left == {1: ""}
        assert not late.reasons
    leave(*members)


def test_two_who_come_at_one_time_are_let_in_one_after_the_other() -> None:
    members, told = two()
    later = [come_later([told["at 0"]], token=told["token"], limit_s=10) for _ in range(2)]
    assert set(later[0]._lines) == set(later[1]._lines) == {0, 1}  # and none to each other
    found: dict[int, tuple[int, ...]] = {}

    def come(one: Control) -> None:
        epoch = one.view.epoch
        while len(found.get(one.me, ())) < 4:
            view, _ = one.next_view(epoch)
            epoch, found[one.me] = view.epoch, view.members

    threads = [threading.Thread(target=come, args=(one,)) for one in (*members, *later)]
    for thread in threads:
        thread.start()
    for _ in range(600):
        guests = sorted(members[0].guests)[:1]
        settled = all(one.view == members[0].view for one in members)
        if guests and settled and not members[0]._council.seat.alarmed:
            for one in (*members, *later):
                if one.me in members[0].view.members:
                    one.admit(guests)
        time.sleep(0.05)
        if not any(thread.is_alive() for thread in threads):
            break
    everybody = tuple(sorted(one.me for one in (*members, *later)))
    assert found == dict.fromkeys(everybody, everybody)
    leave(*members, *later)


def test_who_lets_in_late_calls_for_no_further_view() -> None:
    """Others may have agreed already, also in the name of a device that had not come so far."""
    members, told = two()
    later = come_later([told["at 0"]], token=told["token"], limit_s=10)
    coming = threading.Thread(target=later.next_view, args=(later.view.epoch,))
    coming.start()
    assert wait_until(lambda: members[0].guests and members[1].guests)
    guest = later.me
    members[0].admit([guest])
    first = threading.Thread(target=members[0].next_view, args=(0,))
    first.start()
    assert wait_until(lambda: guest in members[1].view.members)
    members[1].admit([guest])
    assert not members[1]._council.seat.alarmed
    view, _ = members[1].next_view(0)
    assert (view.epoch, view.members) == (1, (0, 1, guest))
    for thread in (coming, first):
        thread.join(20)
    leave(*members, later)


def test_who_waits_for_the_next_view_says_so() -> None:
    """Else the others would take it for stuck, when one of them does not come."""
    members, _ = two()
    seen = members[1]._health[0]
    assert wait_until(lambda: not seen.waits), "it works"
    thread = threading.Thread(target=lambda: is_lost(members[0]))
    thread.start()
    assert wait_until(lambda: seen.waits)
    members[1].leave("the test is over")
    thread.join(10)
    members[0].leave("the test is over")


def test_who_follows_names_the_device_that_failed_first() -> None:
    """Device 0 hears of it from device 1 alone, which had heard it from device 2."""
    members, _ = met(3)
    with members[1]._changed:
        members[1]._heed(2, ["bye", "RuntimeError: bad pixel", 2])
    members[1].leave("PeerLost: device 2 failed: RuntimeError: bad pixel")
    with pytest.raises(PeerLost, match=r"^device 2 failed: RuntimeError: bad pixel$"):
        members[0].next_view(0)
    members[2].leave(INTERRUPTED)
    for member in members:
        member.leave("the test is over")


def test_who_has_too_few_left_does_not_end_the_others() -> None:
    """Device 3 can talk to device 2 alone, and stops; device 2 can talk to all."""
    members, _ = met(4)
    with members[3]._changed:
        for device in (0, 1):
            members[3]._give_up(device, "lost its connection")
    members[3].leave("PeerLost: 2 of 4 devices are gone")
    with pytest.raises(Interrupted):  # it is lost, and has not failed
        members[2].check(0)
    found: dict[int, tuple[int, ...]] = {}

    def go_on(one: Control) -> None:
        found[one.me] = one.next_view(0)[0].members

    threads = [threading.Thread(target=go_on, args=(one,)) for one in members[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == dict.fromkeys(range(3), (0, 1, 2))
    leave(*members[:3])


def test_who_was_interrupted_has_not_failed() -> None:
    members, _ = two()
    members[1].leave(INTERRUPTED)
    with pytest.raises(PeerLost, match=r"^device 1 was interrupted$"):
        members[0].next_view(0)
    members[0].leave(INTERRUPTED)


def wait_until(there: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 20
    while not there() and time.monotonic() < end_s:
        time.sleep(0.02)
    return there()


def is_lost(control: Control) -> None:
    with pytest.raises(PeerLost, match="the test is over"):
        control.next_view(0)

"""Members meet over lines: both ends prove that they know the token, and neither sends it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from terrazzo.errors import PeerLost
from terrazzo.members.control import Control
from terrazzo.members.hello import Challenge
from terrazzo.members.line import HEAD
from terrazzo.members.meeting import Family, call, come_later, heard, meet, tell, unwrapped

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


def two() -> tuple[list[Control], dict[str, str]]:
    """Two members that have met; and what they put where all can read it."""
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

    found: list[Any] = [None, None]

    def begin(me: int) -> None:
        at = (Family.AF_INET, "127.0.0.1")
        found[me] = meet(me, 2, at=at, put=put, get=get, tie=0, limit_s=20)

    threads = [threading.Thread(target=begin, args=(me,)) for me in (0, 1)]
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
]


def test_strangers_get_nowhere_and_disturb_nothing() -> None:
    members, told = two()
    host, port = told["at 0"].split()
    for data in GARBAGE:
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(data)
            heard(stranger)  # a number drawn at random, which tells nothing
            assert is_hung_up(stranger)
    with pytest.raises(OSError, match=r"closed|reset"):
        call(told["at 0"], (7, ""), token="00" * 16, timeout_s=10, wrap=unwrapped)
    with socket.create_connection((host, int(port)), timeout=10) as silent:
        later = come_later([told["at 0"]], token=told["token"], limit_s=10)
        tell(silent, ["hello"])
    assert [len(one.view.members) for one in members] == [2, 2]
    for one in (later, *members):
        one.leave("the test is over")


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


def wait_until(there: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 20
    while not there() and time.monotonic() < end_s:
        time.sleep(0.02)
    return there()


def is_lost(control: Control) -> None:
    with pytest.raises(PeerLost, match="the test is over"):
        control.next_view(0)

"""Samples that other devices hold: found by arithmetic, and believed only with their mark."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terrazzo.feed import pantry as pantry_module
from terrazzo.feed import peers as module
from terrazzo.feed.form import freeze
from terrazzo.feed.pantry import ASK, MARK_BYTES, PUT, SIZE, YES, Address, Pantry
from terrazzo.feed.peers import ABSENT, Peers, owner_of
from terrazzo.members import hello

sys.path.insert(0, str(Path(__file__).parent))

HERE = (socket.AF_INET, "127.0.0.1")
MIB = 1 << 20


@pytest.fixture
def pantry() -> Iterator[Pantry]:
    made = Pantry(MIB, device=3, address=HERE)
    yield made
    made.close()


Make = Callable[[bytes], Peers]


@pytest.fixture
def peers() -> Iterator[Make]:
    made: list[Peers] = []

    def make(key: bytes) -> Peers:
        made.append(Peers(key))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_was_put_comes_back(pantry: Pantry, peers: Make) -> None:
    reader, other = peers(b"k" * 32), peers(b"k" * 32)
    for index in range(20):
        assert reader.put(pantry.address, index, bytes([index]) * 10_000)
    for index in range(20):
        assert other.get(pantry.address, index) == bytes([index]) * 10_000
    assert other.get(pantry.address, 99) == ABSENT
    assert not other.liars


def test_a_full_pantry_says_so(pantry: Pantry, peers: Make) -> None:
    reader = peers(b"k")
    taken = [reader.put(pantry.address, index, bytes(100_000)) for index in range(20)]
    assert taken == [True] * 10 + [False] * 10
    assert reader.put(pantry.address, 99, bytes(2 * MIB)) is False
    assert reader.get(pantry.address, 3) == bytes(100_000), "it is still there"
    assert reader.put(pantry.address, 3, bytes(100_000)), "and takes no room again"


def test_what_is_announced_counts_before_it_is_here(pantry: Pantry, peers: Make) -> None:
    reader, slow = peers(b"k"), peers(b"k")
    assert slow.put(pantry.address, 0, bytes(100)), "it is known there"
    line = slow._peers[pantry.address].line
    assert line is not None
    line.sendall(ASK.pack(PUT, slow._shelf, 1) + SIZE.pack(MIB // 2, bytes(MARK_BYTES)))
    assert line.recv(1) == YES, "there is room for it"
    assert reader.put(pantry.address, 2, bytes(MIB // 2)) is False
    assert reader.put(pantry.address, 3, bytes(MIB // 4)), "and for this, too"
    line.sendall(bytes(MIB // 2))
    assert line.recv(1) == YES


def test_memory_that_was_given_back_is_told(pantry: Pantry, peers: Make) -> None:
    reader = peers(b"k")
    for index in range(8):
        reader.put(pantry.address, index, bytes(100_000))
    pantry.give_back(200_000)
    found = [reader.get(pantry.address, index) != ABSENT for index in range(8)]
    assert found == [True] + [False] * 7


def test_who_does_not_know_the_secret_gets_nothing(pantry: Pantry, peers: Make) -> None:
    peers(b"k").put(pantry.address, 1, b"secret")
    wrong = pantry.address._replace(token="0" * 32)
    assert peers(b"k").get(wrong, 1) is None
    assert not peers(b"k").put(wrong, 2, b"x")
    with socket.create_connection((pantry.address.host, pantry.address.port)) as line:
        line.settimeout(5)
        line.sendall(bytes(hello.CLAIM.size))
        assert line.recv(hello.NONCE_BYTES)
        assert line.recv(1) == b"", "hung up"
    assert peers(b"k").get(pantry.address, 1) == b"secret", "others are still served"


def test_sets_of_samples_with_equal_numbers_do_not_meet(pantry: Pantry, peers: Make) -> None:
    reader, other = peers(b"k"), peers(b"another")
    reader.put(pantry.address, 1, b"one")
    other.put(pantry.address, 1, b"something else")
    assert reader.get(pantry.address, 1) == b"one"
    assert other.get(pantry.address, 1) == b"something else"
    assert other.get(pantry.address, 2) == ABSENT
    assert not reader.liars | other.liars


def test_an_emptied_pantry_is_as_large_as_before(pantry: Pantry, peers: Make) -> None:
    first, second = peers(b"k"), peers(b"another")
    assert all(first.put(pantry.address, index, bytes(100_000)) for index in range(10))
    assert second.put(pantry.address, 0, bytes(100_000)) is False
    pantry.empty()
    assert first.get(pantry.address, 0) == ABSENT
    assert all(second.put(pantry.address, index, bytes(100_000)) for index in range(10))


class Liar:
    """Knows the secret, and answers what it likes."""

    def __init__(self, answers: list[bytes], *, pause_s: float = 0.0, drip_s: float = 0.0) -> None:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.answers, self.pause_s, self.drip_s = answers, pause_s, drip_s
        port = self.listener.getsockname()[1]
        self.address = Address(1, "127.0.0.1", port, "token", MIB)
        threading.Thread(target=self._lie, daemon=True).start()

    def _lie(self) -> None:
        line, _ = self.listener.accept()
        with line, self.listener:
            hello.hear(line, secret=b"token", timeout_s=5)
            for answer in self.answers:
                line.recv(ASK.size)
                time.sleep(self.pause_s)
                pieces = [bytes([byte]) for byte in answer] if self.drip_s else [answer]
                with contextlib.suppress(OSError):
                    for piece in pieces:
                        line.sendall(piece)
                        time.sleep(self.drip_s)


def test_a_peer_that_lies_is_not_believed(peers: Make) -> None:
    reader = peers(b"k")
    good = freeze(b"good")
    liar = Liar([YES + SIZE.pack(len(good), b"0" * 16) + good])
    assert reader.get(liar.address, 1) is None
    assert reader.liars == {liar.address.device}


def test_an_answer_of_any_length_is_refused(peers: Make) -> None:
    reader = peers(b"k")
    liar = Liar([YES + SIZE.pack(1 << 31, b"0" * 16)])
    assert reader.get(liar.address, 1) is None


def test_a_peer_that_is_slow_is_left_alone(monkeypatch: pytest.MonkeyPatch, peers: Make) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    reader, liar = peers(b"k"), Liar([YES], pause_s=0.5)
    assert reader.get(liar.address, 1) is None
    peer = reader._peers[liar.address]
    assert reader.get(liar.address, 2) is None
    assert reader.put(liar.address, 2, b"x") is None
    assert peer.failed == 1, "nobody is called again"
    for times in (2, 4):
        peer.until = 0.0  # its time is over
        before = time.monotonic()
        assert reader.get(liar.address, 1) is None
        assert peer.until - before >= times * module.ALONE_S, "who fails again waits longer"
    peer.until, peer.failed = 0.0, 60
    assert reader.get(liar.address, 1) is None
    assert peer.until - time.monotonic() <= module.MOST_ALONE_S


def test_a_right_answer_that_drips_is_too_late(
    monkeypatch: pytest.MonkeyPatch, peers: Make
) -> None:
    reader, data = peers(b"k"), freeze(bytes(60))
    answer = YES + SIZE.pack(len(data), reader._mark(1, data)) + data
    assert reader.get(Liar([answer]).address, 1) == data, "it is right"
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    assert reader.get(Liar([answer], drip_s=0.02).address, 1) is None


def test_a_peer_that_is_slower_than_storage_is_asked_now_and_then(
    pantry: Pantry, peers: Make
) -> None:
    reader = peers(b"k")
    assert reader.put(pantry.address, 1, bytes(1000))
    reader.saw_storage(1e-12, 1000)
    peer = reader._peers[pantry.address]
    assert reader.get(pantry.address, 1) is None
    assert reader.put(pantry.address, 2, bytes(1000)) is None, "nor is it sent anything"
    peer.again = 0.0
    before = time.monotonic()
    assert reader.get(pantry.address, 1) is not None
    took_s = time.monotonic() - before
    assert before < peer.again <= time.monotonic() + took_s / module.TRY_SHARE, "1 % of the time"
    peer.took(2.0, 1000)
    assert peer.again > time.monotonic() + 190, "one that takes long is tried seldom"
    assert reader.get(pantry.address, 1) is None


def test_a_stranger_takes_no_place_from_others(
    monkeypatch: pytest.MonkeyPatch, peers: Make
) -> None:
    monkeypatch.setattr(pantry_module, "MOST_CALLERS", 1)
    monkeypatch.setattr(pantry_module, "MOST_STRANGERS", 3)
    pantry, reader = Pantry(MIB, device=3, address=HERE), peers(b"k")
    with contextlib.ExitStack() as stack:
        stack.callback(pantry.close)
        where = (pantry.address.host, pantry.address.port)
        for _ in range(2):  # who say nothing
            line = stack.enter_context(socket.create_connection(where))
            assert line.recv(hello.NONCE_BYTES)
        assert reader.put(pantry.address, 1, b"x")


def test_a_pantry_that_is_gone_is_no_error(pantry: Pantry, peers: Make) -> None:
    reader = peers(b"k")
    reader.put(pantry.address, 1, b"x")
    os.kill(pantry._process.pid, 9)
    pantry._process.join()
    assert reader.get(pantry.address, 1) is None
    assert not reader.put(pantry.address, 2, b"x")


# ---- who holds what -------------------------------------------------------------------------


def test_shares_follow_the_memory_of_devices() -> None:
    rooms = [(0, 100), (1, 300), (2, 0), (5, 200)]
    found = Counter(owner_of(7, index, rooms) for index in range(6000))
    assert found[0] == pytest.approx(1000, rel=0.1)
    assert found[1] == pytest.approx(3000, rel=0.1)
    assert found[5] == pytest.approx(2000, rel=0.1)
    assert found[2] == 0
    assert owner_of(7, 1, []) is None


def test_a_lost_device_moves_only_its_own_samples() -> None:
    rooms = [(device, 100) for device in range(4)]
    before = [owner_of(3, index, rooms) for index in range(4000)]
    after = [owner_of(3, index, rooms[:2] + rooms[3:]) for index in range(4000)]
    assert all(a == b for a, b in zip(before, after, strict=True) if a != 2)
    moved = Counter(b for a, b in zip(before, after, strict=True) if a == 2)
    assert set(moved) == {0, 1, 3}
    assert min(moved.values()) > 250

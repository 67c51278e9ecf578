"""Discovery: what counts as an answer, and what strangers may say."""

from __future__ import annotations

import json
import select
import threading
from dataclasses import asdict
from typing import Any

import pytest

from terrazzo.cluster.agent.look import interfaces
from terrazzo.cluster.discovery import QUESTION_BYTES, VERSION, Announcement, Announcer, discover

pytestmark = pytest.mark.timeout(60)
TOLD = Announcement("pi1", user="pi", system="Linux aarch64, 4 cores")


def packed(**other: Any) -> bytes:
    body = {"terrazzo": "here", "version": VERSION, "nonce": "n", **asdict(TOLD), **other}
    return json.dumps(body).encode()


def test_an_answer_is_taken() -> None:
    assert Announcement.parse(packed(), "n") == TOLD


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\x00", b"[]", b"null", b"{}", packed(nonce="other"), packed(version=2),
        packed(name="-oProxyCommand=x"), packed(name="a\nb"), packed(name="\x1b[2J"),
        packed(user="a b"), packed(port=0), packed(port=70000), packed(port="x"), packed(port=None),
        packed(pair_port=-1), packed(terrazzo="who"),
    ],
)  # fmt: skip
def test_anything_else_is_not(data: bytes) -> None:
    assert Announcement.parse(data, "n") is None


def test_what_is_shown_holds_no_escape_codes() -> None:
    found = Announcement.parse(packed(system="Linux\x1b[31m" + "x" * 500), "n")
    assert found is not None
    assert found.system.isprintable()
    assert len(found.system) <= 80


@pytest.fixture
def port() -> int:
    return 47748


def test_who_announces_is_found(port: int) -> None:
    addresses = [at for at in interfaces().values() if at and not at.startswith("127.")]
    if not addresses:
        pytest.skip("discovery was NOT tested: this machine has no network")
    one = Announcer(TOLD, addresses=addresses[:1], port=port)
    over = threading.Event()
    serving = threading.Thread(target=serve, args=(one, over))
    serving.start()
    try:
        found = discover(seconds=1.0, port=port)
    finally:
        over.set()
        serving.join()
        one.close()
    assert found.get(addresses[0]) == TOLD


def serve(one: Announcer, over: threading.Event) -> None:
    while not over.is_set():
        if select.select([one], [], [], 0.05)[0]:
            one.answer()


def test_an_answer_is_never_longer_than_the_question() -> None:
    longest = Announcement("n" * 63, user="u" * 64, port=65535, pair_port=65535, system="s" * 80)
    body = {"terrazzo": "here", "version": VERSION, "nonce": "0" * 32, **asdict(longest)}
    assert len(json.dumps(body)) <= QUESTION_BYTES

"""Hello: who knows the secret gets through, whatever others do at the same door."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from terrazzo.members import hello

pytestmark = pytest.mark.timeout(60)
SECRET = b"a secret of this run"


class Host:
    """A device that waits for some others to call."""

    def __init__(self, expected: list[int], timeout_s: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.pool = ThreadPoolExecutor(1)
        self.found: Future[dict[int, socket.socket]] = self.pool.submit(
            hello.answer, self.listener, secret=SECRET, expected=expected, timeout_s=timeout_s
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def call(self, device: int, secret: bytes = SECRET) -> socket.socket:
        connection = self.connect()
        try:
            hello.call(connection, secret=secret, device=device)
        except OSError:
            connection.close()
            raise
        return connection


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def host(cleanup: ExitStack, expected: list[int], timeout_s: float = 30.0) -> Host:
    made = Host(expected, timeout_s)
    cleanup.callback(made.pool.shutdown)
    cleanup.enter_context(made.listener)
    return made


def test_all_who_know_it_get_through(cleanup: ExitStack) -> None:
    one = host(cleanup, [1, 2])
    calls = {device: cleanup.enter_context(one.call(device)) for device in (2, 1)}
    found = one.found.result()
    assert sorted(found) == [1, 2]
    for device, connection in found.items():
        with connection:
            connection.sendall(b"%d" % device)
            assert calls[device].recv(1) == b"%d" % device


def test_another_secret_a_wrong_number_and_a_second_caller_are_hung_up_on(
    cleanup: ExitStack,
) -> None:
    one = host(cleanup, [1, 2])
    with pytest.raises(OSError, match="hung up"):
        one.call(1, b"another secret")
    with pytest.raises(OSError, match="hung up"):
        one.call(7)
    cleanup.enter_context(one.call(1))
    with pytest.raises(OSError, match="hung up"):
        one.call(1)  # the first one counts
    cleanup.enter_context(one.call(2))
    for connection in one.found.result().values():
        connection.close()


def test_garbage_silence_and_crowds_hold_up_nobody(cleanup: ExitStack) -> None:
    one = host(cleanup, [1])
    for _ in range(hello.MOST_CALLERS + 10):  # none of them ever says a word
        cleanup.enter_context(one.connect())
    slow = cleanup.enter_context(one.connect())
    slow.sendall(b"x")
    loud = cleanup.enter_context(one.connect())
    with suppress(OSError):  # it is hung up on, which is seen sooner or later
        for _ in range(100):
            loud.sendall(bytes(1 << 20))
    cleanup.enter_context(one.call(1))
    (connection,) = one.found.result().values()
    connection.close()


def test_an_answer_by_somebody_else_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(hello.NONCE_BYTES))
                connection.recv(hello.CLAIM.size, socket.MSG_WAITALL)
                connection.sendall(bytes(hello.PROOF_BYTES))

        done = pool.submit(pretend)
        with (
            socket.create_connection(listener.getsockname(), timeout=20) as connection,
            pytest.raises(OSError, match="does not know this run's secret"),
        ):
            hello.call(connection, secret=SECRET, device=1)
        done.result()


def test_a_recorded_hello_opens_nothing(cleanup: ExitStack) -> None:
    """What was said once proves nothing the next time: the listener draws another number."""
    first, second = host(cleanup, [1]), host(cleanup, [1])
    said: list[bytes] = []

    class Heard:
        def __init__(self, inner: socket.socket) -> None:
            self.recv, self._inner = inner.recv, inner
            self.gettimeout, self.settimeout = inner.gettimeout, inner.settimeout

        def sendall(self, data: bytes) -> None:
            said.append(data)
            self._inner.sendall(data)

    with first.connect() as connection:
        hello.call(Heard(connection), secret=SECRET, device=1)  # type: ignore[arg-type]
    with second.connect() as replay:
        replay.recv(hello.NONCE_BYTES, socket.MSG_WAITALL)
        replay.sendall(said[0])
        assert replay.recv(1) == b""
    cleanup.enter_context(second.call(1))
    for one in (first, second):
        for connection in one.found.result().values():
            connection.close()


def test_who_does_not_call_is_named(cleanup: ExitStack) -> None:
    one = host(cleanup, [1, 4], timeout_s=0.3)
    cleanup.enter_context(one.call(1))
    with pytest.raises(TimeoutError, match=r"device 4 did not call within 0\.3 s"):
        one.found.result()

"""Control connections: encrypted, for devices of the run alone, and deaf to strangers."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from terrazzo.cluster.credentials import make_credentials
from terrazzo.errors import LaunchError
from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.store import meet
from terrazzo.runtime.tunnel import MOST_STRANGERS, listen

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="TLS was NOT tested: no openssl"),
]
LIMIT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> list[Credentials]:
    """Of two runs."""
    folder = tmp_path_factory.mktemp("keys")
    found = []
    for name in ("ours", "theirs"):
        path = folder / name
        path.write_text(make_credentials())
        found.append(Credentials(path))
    return found


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.2", 0))
        yield holder.getsockname()[1]


def test_devices_meet_and_strangers_do_not(credentials: list[Credentials], port: int) -> None:
    ours, theirs = credentials
    address = ("127.0.0.2", port)
    host = meet(address, device=0, devices=3, limit=LIMIT, credentials=ours)
    strangers = [socket.create_connection(address) for _ in range(MOST_STRANGERS // 2)]
    try:
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[1].sendall(bytes(100_000))
        with ThreadPoolExecutor(2) as pool:
            joined = [
                pool.submit(
                    meet, address, device=device, devices=3, limit=LIMIT, credentials=ours
                ).result()
                for device in (1, 2)
            ]
        joined[0].set("from 1", "x" * 1_000_000)  # more than a tunnel holds at once
        assert len(joined[1].get("from 1")) == 1_000_000
        assert host.get("from 1") == b"x" * 1_000_000
        with pytest.raises(PermissionError, match="this run's credentials"):
            meet(address, device=1, devices=3, limit=LIMIT, credentials=theirs)
        joined[0].set("after", "y")
        assert host.get("after") == b"y"
    finally:
        for stranger in strangers:
            stranger.close()


def test_nothing_is_heard_without_the_handshake(credentials: list[Credentials], port: int) -> None:
    address = ("127.0.0.2", port)
    meet(address, device=0, devices=2, limit=LIMIT, credentials=credentials[0])
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, timeout=20) as plain,
        context.wrap_socket(plain) as one,
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        one.recv(1)  # with TLS 1.3 a refusal is told on the first read


def test_the_store_listens_on_its_address_alone(port: int) -> None:
    store = meet(("127.0.0.2", port), device=0, devices=1, limit=LIMIT, credentials=None)
    store.set("a", "b")
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_tunnels_store_is_not_on_the_network(credentials: list[Credentials], port: int) -> None:
    store = meet(("127.0.0.2", port), device=0, devices=1, limit=LIMIT, credentials=credentials[0])
    inner = store.port  # type: ignore[attr-defined]
    socket.create_connection(("127.0.0.1", inner)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", inner))


def test_damaged_credentials_are_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("no key")
    with pytest.raises(LaunchError, match=f"cannot be read from {path}"):
        Credentials(path).serving()


def test_a_listener_takes_one_address() -> None:
    with listen(("127.0.0.3", 0)) as one:
        port = one.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

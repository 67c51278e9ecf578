"""Pairing: the code lets a key in, and nothing else does."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from terrazzo.cluster.pairing import (
    NONCE_BYTES,
    WRONG_CODES,
    Pairing,
    _proof,
    _send,
    add_key,
    fingerprint,
    know_host,
    new_code,
    pair,
    read_code,
)
from terrazzo.errors import HostError, UsageError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A user's public key, and a device's host key."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("user", "ssh_host_ed25519_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    names = ("user.pub", "ssh_host_ed25519_key.pub")
    return [str(folder), *((folder / name).read_text() for name in names)]


@pytest.fixture
def waiting(tmp_path: Path, keys: list[str]) -> Iterator[Pairing]:
    one = Pairing("127.0.0.1", ssh=tmp_path / "ssh", host_keys=Path(keys[0]))
    yield one
    one.close()


def met(waiting: Pairing, code: str, key: str) -> list[str]:
    """Both sides at once; the host keys that were learnt."""
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(waiting.serve)
        try:
            return pair(("127.0.0.1", waiting.port), code=code, key=key)
        finally:
            served.result()


def test_with_the_code_both_learn_the_others_key(
    waiting: Pairing, keys: list[str], tmp_path: Path
) -> None:
    _, user, host = keys
    typed = waiting.code.lower().replace("-", " ").replace("o", "0")
    learnt = met(waiting, typed, user)
    assert learnt == [" ".join(host.split()[:2])]
    allowed = tmp_path / "ssh" / "authorized_keys"
    assert " ".join(user.split()[:2]) in allowed.read_text()
    assert allowed.stat().st_mode & 0o077 == 0
    assert not waiting.is_open, "a code is good for one pairing"


def test_without_it_nobody_gets_in_and_three_tries_end_it(
    waiting: Pairing, keys: list[str], tmp_path: Path
) -> None:
    for _ in range(WRONG_CODES):
        assert waiting.is_open
        with pytest.raises(HostError, match="is the code right"):
            met(waiting, new_code(), keys[1])
    assert not waiting.is_open
    assert not (tmp_path / "ssh").exists()


def test_a_key_with_options_is_no_key(waiting: Pairing, keys: list[str], tmp_path: Path) -> None:
    """Who knows the code could still not slip in a line that does more than let a key in."""
    key = 'command="rm" ' + keys[1]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(waiting.serve)
        with socket.create_connection(("127.0.0.1", waiting.port), timeout=20) as one:
            theirs = one.recv(NONCE_BYTES, socket.MSG_WAITALL)
            proof = _proof(waiting.code, b"ask", theirs, bytes(NONCE_BYTES), key).hex()
            _send(one, {"key": key, "nonce": "00" * NONCE_BYTES, "proof": proof})
            assert served.result() == ""
    assert not (tmp_path / "ssh").exists()


@pytest.mark.parametrize("words", [b"", b"\xff" * 4, b"\0\0\0\2{}", b'\0\0\0\5"abc"'])
def test_garbage_gets_nowhere(waiting: Pairing, words: bytes, tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", waiting.port), timeout=20) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        assert waiting.serve() == ""
        assert len(stranger.recv(100, socket.MSG_WAITALL)) in (0, NONCE_BYTES)
    assert waiting.is_open
    assert not (tmp_path / "ssh").exists()


@pytest.mark.parametrize("proof", ["00" * 32, "no number", "\u00e9", 7])
def test_who_only_pretends_to_be_the_device_is_found_out(keys: list[str], proof: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                connection.recv(4096)
                reply = json.dumps({"body": json.dumps([keys[1]]), "proof": proof}).encode()
                connection.sendall(len(reply).to_bytes(4, "big") + reply)

        done = pool.submit(pretend)
        with pytest.raises(HostError, match="does not know the code"):
            pair(listener.getsockname(), code=new_code(), key=keys[1])
        done.result()


def test_a_known_host_is_not_replaced(tmp_path: Path, keys: list[str]) -> None:
    path = tmp_path / "known_hosts"
    own, other = (" ".join(key.split()[:2]) for key in keys[1:])
    know_host(path, ["pi1", "10.0.0.1"], [own])
    know_host(path, ["pi1"], [own])
    assert path.read_text() == f"pi1 {own}\n10.0.0.1 {own}\n"
    with pytest.raises(HostError, match="ssh-keygen -R pi1"):
        know_host(path, ["pi1"], [other])


def test_a_key_is_added_once_and_after_a_line_without_end(tmp_path: Path, keys: list[str]) -> None:
    path = tmp_path / "authorized_keys"
    path.write_text("ssh-ed25519 another")
    own = " ".join(keys[1].split()[:2])
    add_key(path, own)
    add_key(path, own)
    assert path.read_text() == f"ssh-ed25519 another\n{own} terrazzo pairing\n"


def test_fingerprints_are_those_of_ssh(keys: list[str]) -> None:
    command = ["ssh-keygen", "-l", "-f", f"{keys[0]}/user.pub"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert fingerprint(keys[1]) in told


@pytest.mark.parametrize("typed", ["", "ABCD", "ABCD-EFGH-IJKL-MNO!", "A" * 17])
def test_no_code(typed: str) -> None:
    with pytest.raises(UsageError, match="no pairing code"):
        read_code(typed)

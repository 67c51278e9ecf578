"""Pairing: a person carries a code from a device to the starter, and SSH works from then on.

    device    shows a code of 80 bits, and waits for a few minutes
    starter ──▶ device   its public SSH key, proved by the code
    device  ──▶ starter  its host keys, proved by the code

Only public keys travel. Who does not know the code can neither put in a key of their own nor pass
for the device; the code is good for one pairing, and three wrong ones end it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from terrazzo.errors import HostError, UsageError

CODE_BYTES, NONCE_BYTES = 10, 16
TALK_S, OPEN_S = 3.0, 300.0
MOST_BYTES = 16_384
WRONG_CODES = 3
PUBLIC = re.compile(r"(ssh|ecdsa-sha2|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]{40,2000}")
HOST_KEYS = Path("/etc/ssh")


def new_code() -> str:
    """Four groups of four letters and digits, without those that look alike."""
    text = base64.b32encode(secrets.token_bytes(CODE_BYTES)).decode()
    return "-".join(text[at : at + 4] for at in range(0, 16, 4))


def read_code(typed: str) -> bytes:
    """As a person may type it."""
    text = re.sub(r"[\s-]", "", typed).upper().replace("0", "O").replace("1", "I")
    if not re.fullmatch(r"[A-Z2-7]{16}", text):
        raise UsageError(f"{typed!r} is no pairing code: it is like ABCD-EFGH-IJKL-MNOP")
    return text.encode()


class Pairing:
    """The device's side: open for one pairing."""

    def __init__(self, address: str, *, ssh: Path, host_keys: Path = HOST_KEYS) -> None:
        self.code = new_code()
        self._ssh, self._host_keys = ssh, host_keys
        self._listener = socket.create_server((address, 0))
        self._until_s = time.monotonic() + OPEN_S
        self._wrong = 0
        self.port = int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        return self._listener.fileno()

    @property
    def is_open(self) -> bool:
        return self._wrong < WRONG_CODES and time.monotonic() < self._until_s

    def close(self) -> None:
        self._listener.close()

    def serve(self) -> str:
        """One caller; gives the key that was let in, or nothing."""
        connection, _ = self._listener.accept()
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.settimeout(TALK_S)
            connection.sendall(nonce)
            asked = _receive(connection)
            key, theirs = _public(asked["key"]), bytes.fromhex(asked["nonce"])
            wanted = _proof(self.code, b"ask", nonce, theirs, key)
            if not hmac.compare_digest(bytes.fromhex(asked["proof"]), wanted):
                self._wrong += 1
                return ""
            self._wrong = WRONG_CODES  # used up, whatever comes
            add_key(self._ssh / "authorized_keys", key)
            body = json.dumps(host_keys(self._host_keys))
            proof = _proof(self.code, b"answer", nonce, theirs, body).hex()
            _send(connection, {"body": body, "proof": proof})
            return key
        return ""


def pair(address: tuple[str, int], *, code: str, key: str) -> list[str]:
    """The starter's side: brings its key, gives back the device's host keys."""
    secret = read_code(code).decode()
    title = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=TALK_S) as connection:
            theirs = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            own = secrets.token_bytes(NONCE_BYTES)
            proof = _proof(secret, b"ask", theirs, own, _public(key))
            _send(connection, {"key": _public(key), "nonce": own.hex(), "proof": proof.hex()})
            told = _receive(connection)
    except (OSError, ValueError) as error:
        raise HostError(
            f"{title} did not pair ({_why(error)}): is the code right, and is terrazzo cluster "
            "announce --pair still waiting there? Three wrong codes end it"
        ) from error
    wanted = _proof(secret, b"answer", theirs, own, str(told.get("body"))).hex()
    if not hmac.compare_digest(str(told.get("proof")).encode(), wanted.encode()):
        raise HostError(f"{title} does not know the code: it is not the device that showed it")
    return [_public(line) for line in json.loads(told["body"])]


def _why(error: Exception) -> str:
    """The system's words without the number."""
    return str(getattr(error, "strerror", None) or error)


def host_keys(folder: Path) -> list[str]:
    found = [path.read_text(encoding="ascii") for path in sorted(folder.glob("ssh_host_*_key.pub"))]
    return [_public(text) for text in found]


def own_key(ssh: Path) -> str:
    """The user's public key, the kind that ssh would try first."""
    for name in ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub"):
        with suppress(OSError):
            return _public((ssh / name).read_text(encoding="utf-8"))
    raise UsageError(f"there is no public key in {ssh}: make one with ssh-keygen -t ed25519")


def add_key(path: Path, key: str) -> None:
    """One more key that may log in here; once."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = path.read_text(encoding="utf-8") if path.exists() else ""
    if key in present:
        return
    lead = "" if not present or present.endswith("\n") else "\n"
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(number, "a", encoding="utf-8") as file:
        file.write(f"{lead}{key} terrazzo pairing\n")


def know_host(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    """Notes host keys; one that is known otherwise is not replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    for name in names:
        known = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", str(path)], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in known.splitlines() if line and not line.startswith("#")]
        told = {tuple(key.split()[:2]) for key in keys}
        kinds = {kind for kind, _ in told}
        if any(tuple(row[1:3]) not in told for row in rows if row[1] in kinds):
            raise HostError(
                f"{path} knows {name} by another key: if the device was set up anew, remove it "
                f"first with ssh-keygen -R {name}"
            )
        with path.open("a", encoding="utf-8") as file:
            have = {tuple(row[1:3]) for row in rows}
            for key in keys:
                if tuple(key.split()[:2]) not in have:
                    file.write(f"{name} {key}\n")


def fingerprint(key: str) -> str:
    """As ssh-keygen -l shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _public(text: str) -> str:
    """Kind and key, without the comment; ValueError for anything else, options above all."""
    found = PUBLIC.match(str(text).strip())
    if found is None:
        raise ValueError("no public key")
    return found.group(0)


def _proof(code: str, who: bytes, device: bytes, starter: bytes, text: str) -> bytes:
    secret = code.replace("-", "").encode()
    words = b"terrazzo pairing 1 " + who + device + starter + text.encode()
    return hmac.new(secret, words, hashlib.sha256).digest()


def _send(connection: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    length = int.from_bytes(_exactly(connection, 4), "big")
    if length > MOST_BYTES:
        raise ValueError("too long")
    found = json.loads(_exactly(connection, length))
    if not isinstance(found, dict):
        raise ValueError("no answer")
    return found


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, within one time limit however slowly they come."""
    end_s, told = time.monotonic() + TALK_S, b""
    while len(told) < count:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        part = connection.recv(count - len(told))
        if not part or time.monotonic() > end_s:
            raise OSError("it hung up")
        told += part
    return told

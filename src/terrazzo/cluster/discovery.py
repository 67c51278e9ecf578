"""Discovery: devices that announce themselves answer a question put to the whole local network.

An answer is a hint where a device may be, no more: anybody on the network can give one. Whether it
is the right device, and whether it lets us in, is for SSH to find out.

    discover ── multicast: who is there? (padded) ──▶ announce
    discover ◀── its name, user and system, to the asker alone, never longer than the question ──
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.cluster.agent.look import interfaces
from terrazzo.errors import LaunchError
from terrazzo.records.cluster import NAME, USER

GROUP, PORT = "239.255.77.77", 47747
VERSION = 1
QUESTION_BYTES = 600
"""As long as the longest answer, so that nobody can use devices to flood somebody else."""
MOST_ANSWERS = 256
ANSWERS_PER_S = 20
ASK_TIMES = 3


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a device tells of itself; its address is where the answer came from."""

    name: str
    user: str = ""
    port: int = 22
    pair_port: int = 0
    system: str = ""

    @classmethod
    def parse(cls, data: bytes, nonce: str) -> Announcement | None:
        """None for whatever is no answer to this question: the network is full of strangers."""
        try:
            body: Any = json.loads(data)
            wanted = ("here", VERSION, nonce)
            if (body["terrazzo"], body["version"], body["nonce"]) != wanted:
                return None
            found = cls(
                name=str(body["name"]),
                user=str(body["user"]),
                port=int(body["port"]),
                pair_port=int(body["pair_port"]),
                system=_plain(str(body["system"])),
            )
        except (ValueError, KeyError, TypeError):
            return None
        ports_fit = 0 < found.port < 65536 and 0 <= found.pair_port < 65536
        user_fits = not found.user or USER.fullmatch(found.user)
        return found if NAME.fullmatch(found.name) and ports_fit and user_fits else None


def discover(*, seconds: float, port: int = PORT) -> dict[str, Announcement]:
    """Who answers on any network of this machine, by address."""
    nonce = secrets.token_hex(8)
    question = json.dumps({"terrazzo": "who", "version": VERSION, "nonce": nonce}).encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.bind(("", 0))
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)  # no router passes it on
        found: dict[str, Announcement] = {}
        for _ in range(ASK_TIMES):
            _ask(asking, question.ljust(QUESTION_BYTES), port)
            for data, address in _answers(asking, seconds / ASK_TIMES):
                heard = Announcement.parse(data, nonce)
                if heard is not None and len(found) < MOST_ANSWERS:
                    found[address] = heard
    return dict(sorted(found.items(), key=lambda item: socket.inet_aton(item[0])))


def _ask(asking: socket.socket, question: bytes, port: int) -> None:
    """On every interface: the one that a route points to need not be where devices are."""
    for address in set(interfaces().values()) - {""}:
        with suppress(OSError):
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            asking.sendto(question, (GROUP, port))


def _answers(asking: socket.socket, seconds: float) -> Iterator[tuple[bytes, str]]:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([asking], [], [], left_s)[0]:
            with suppress(OSError):
                data, (address, _) = asking.recvfrom(2 * QUESTION_BYTES)
                yield data, address


class Announcer:
    """Answers questions until it is closed; ``told`` is what it says."""

    def __init__(self, told: Announcement, *, addresses: Sequence[str], port: int = PORT) -> None:
        self.told = told
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._recent: list[float] = []
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((GROUP, port))  # what is sent to this machine itself never arrives
            for address in addresses:
                wanted = socket.inet_aton(GROUP) + socket.inet_aton(address)
                self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, wanted)
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"cannot announce this device on {', '.join(addresses)}: {error}"
            ) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> str:
        """Answers one question, if it is one; gives the asker's address, or nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            data, asker = self._socket.recvfrom(4 * QUESTION_BYTES)
            body: Any = json.loads(data)
            if (body["terrazzo"], body["version"]) != ("who", VERSION) or not self._may_answer():
                return ""
            nonce = str(body["nonce"])[:32]
            told = {"terrazzo": "here", "version": VERSION, "nonce": nonce, **asdict(self.told)}
            reply = json.dumps(told).encode()
            if len(reply) <= len(data):
                self._socket.sendto(reply, asker)
                return str(asker[0])
        return ""

    def close(self) -> None:
        self._socket.close()

    def _may_answer(self) -> bool:
        now_s = time.monotonic()
        self._recent = [at_s for at_s in self._recent if now_s - at_s < 1.0]
        self._recent.append(now_s)
        return len(self._recent) <= ANSWERS_PER_S


def _plain(text: str) -> str:
    """What strangers send may hold escape codes for a terminal."""
    return "".join(c for c in text if c.isprintable())[:80]

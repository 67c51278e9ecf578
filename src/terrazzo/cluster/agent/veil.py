"""The veil: a WireGuard interface on a device, for as long as the starter holds the connection.

The private key is made here and never leaves. The others' public keys come over SSH, so nobody who
can't log in gets a word in. What a killed agent left behind, the next one removes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from terrazzo.cluster.agent.frames import ERROR, Frames
from terrazzo.cluster.agent.listening import Silence
from terrazzo.cluster.agent.look import which

PREFIX = "tzveil"
COMMAND_S, APPEAR_S, POLL_S = 20.0, 5.0, 0.05
GREET_S = 16.0
"""A handshake that got no answer is tried again after 5 s."""


def hold(request: dict[str, Any], frames: Frames) -> None:
    """Makes the interface, tells its key and port, lets the others in, and waits for the end."""
    remove_stale()
    name = f"{PREFIX}{os.getpid()}"
    try:
        make(name)
        key = run("wg", "genkey").strip()
        run("wg", "set", name, "private-key", "/dev/stdin", "listen-port", "0", text=key + "\n")
        run("ip", "address", "add", f"{request['address']}/{request['bits']}", "dev", name)
        run("ip", "link", "set", name, "up")
        public = run("wg", "pubkey", text=key).strip()
        frames.tell({"name": name, "key": public, "port": listen_port(name)})
        peers = frames.hear()
        for peer in peers:
            admit(name, peer)
        frames.tell({})
        frames.hear()  # all know each other now: before, a first handshake would be thrown away
        frames.tell(greet(name, peers))
        known = {peer["address"]: peer for peer in peers}
        heard = partial(admit_anew, name, known, frames)
        Silence(frames, float(request["lost_after_s"]), heard=heard).wait()
    finally:
        remove(name)


def admit(name: str, peer: dict[str, Any]) -> None:
    run(
        "wg", "set", name, "peer", peer["key"], "allowed-ips", f"{peer['address']}/32",
        "endpoint", f"{peer['host']}:{peer['port']}",
    )  # fmt: skip


def admit_anew(
    name: str, known: dict[str, dict[str, Any]], frames: Frames, kind: bytes, body: bytes
) -> None:
    """A device has come, or has booted and has another key: the one before is of no use."""
    peer = json.loads(body)
    before = known.get(peer["address"])
    try:
        if before is not None:
            run("wg", "set", name, "peer", before["key"], "remove")
        admit(name, peer)
    except OSError as error:
        frames.send(ERROR, json.dumps(str(error.strerror)).encode())
        return
    known[peer["address"]] = peer
    frames.tell({})


def listen_port(name: str) -> int:
    """wireguard-go opens it a moment after the interface is up."""
    end_s = time.monotonic() + APPEAR_S
    while not (port := int(run("wg", "show", name, "listen-port"))):
        if time.monotonic() > end_s:
            raise OSError(0, f"{name} has no port {APPEAR_S:g} s after it was made")
        time.sleep(POLL_S)
    return port


def greet(name: str, peers: list[dict[str, Any]]) -> list[str]:
    """Has a handshake with every other device; gives the addresses of those who do not answer."""
    for peer in peers:
        run("wg", "set", name, "peer", peer["key"], "persistent-keepalive", "15")
    end_s = time.monotonic() + GREET_S
    while silent := strangers(name, peers):
        if time.monotonic() > end_s:
            break
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as knock:
            for address in silent:
                knock.sendto(b"", (address, 9))
        time.sleep(4 * POLL_S)
    return silent


def strangers(name: str, peers: list[dict[str, Any]]) -> list[str]:
    """Addresses of those with whom there was no handshake yet."""
    rows = [line.split() for line in run("wg", "show", name, "latest-handshakes").splitlines()]
    known = {row[0] for row in rows if len(row) == 2 and row[1] != "0"}
    return [str(peer["address"]) for peer in peers if peer["key"] not in known]


def make(name: str) -> None:
    """By the kernel where it has WireGuard, else by a program that does the same."""
    try:
        run("ip", "link", "add", name, "type", "wireguard")
    except OSError:
        if not which("wireguard-go"):
            raise OSError(
                0, "this kernel has no WireGuard, and there is no wireguard-go: install one, or "
                "leave encrypt out"
            ) from None  # fmt: skip
        run("wireguard-go", name)
        end_s = time.monotonic() + APPEAR_S
        while time.monotonic() < end_s and name not in run("wg", "show", "interfaces").split():
            time.sleep(POLL_S)


def remove(name: str) -> None:
    with suppress(OSError):
        run("ip", "link", "delete", name)


def remove_stale() -> None:
    """Those whose maker, named by its number, is gone."""
    for entry in Path("/sys/class/net").iterdir():
        number = entry.name.removeprefix(PREFIX)
        if entry.name != number and number.isdigit() and not Path(f"/proc/{number}").exists():
            remove(entry.name)


def run(*command: str, text: str = "") -> str:
    """As root, directly or by a sudo that asks nothing; OSError says what was refused."""
    words = [which(command[0]) or command[0], *command[1:]]
    if os.geteuid() != 0:
        words = ["sudo", "-n", *words]
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
    except subprocess.SubprocessError as error:
        raise OSError(0, f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["refused"])[-1]
        raise OSError(0, f"{' '.join(command[:3])}: {said}")
    return done.stdout

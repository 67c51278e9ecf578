"""Reach: whether each device gets to each other one, tried with real connections."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from terrazzo.cluster.inspection import Facts, Finding
from terrazzo.cluster.session import ask, session
from terrazzo.cluster.ssh import Ssh
from terrazzo.errors import HostError


def try_connections(devices: Sequence[Ssh], facts: Sequence[Facts]) -> list[Finding]:
    """Who can't get to whom; nothing, where all can."""
    addresses = [fact.address(ssh.device) for ssh, fact in zip(devices, facts, strict=True)]
    placed = [number for number, address in enumerate(addresses) if address]  # others are findings
    with ExitStack() as cleanup, ThreadPoolExecutor(max_workers=len(devices)) as pool:
        ports: dict[int, int] = {}
        for number in placed:
            try:
                held = session(devices[number], "hold", address=addresses[number])
                one = cleanup.enter_context(held)
                ports[number] = int(one.hear())
            except HostError:
                continue  # an address that is not there is a finding of its own
        targets = [[addresses[number], port] for number, port in ports.items()]

        def call(number: int) -> Any:
            try:
                return ask(devices[number], "call", address=addresses[number], targets=targets)
            except HostError as error:
                return [{"error": str(error)}] * len(targets)

        answers = list(pool.map(call, placed))
    found = []
    for number, rows in zip(placed, answers, strict=True):
        for other, row in zip(ports, rows, strict=True):
            if "error" in row:
                found.append(_unreached(devices, number, other, addresses[other], row["error"]))
    return found


def _unreached(
    devices: Sequence[Ssh], number: int, other: int, address: str, error: str
) -> Finding:
    title, there = devices[number].device.title, devices[other].device.title
    return Finding(
        number,
        f"{title} does not get to {there} at {address}: {error}",
        "Are both on one network? Write address = or interface = of the one they share, and let "
        "firewalls pass what comes from the other devices",
    )

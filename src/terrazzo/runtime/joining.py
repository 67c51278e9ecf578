"""Joining: a device that comes later is let in between two batches, and receives everything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import LaunchError
from terrazzo.members.control import Interrupted
from terrazzo.members.meeting import come_later, unwrapped
from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.links import Links
from terrazzo.runtime.recovery import (
    NEW,
    PROBATION,
    Host,
    Recovery,
    encrypted,
    first_old,
    probation,
)
from terrazzo.runtime.regroup import regroup


@dataclass(frozen=True)
class Later:
    """Where the devices of a run are, for one that comes later."""

    addresses: tuple[str, ...]
    token: str
    timeout_s: float
    credentials: Credentials | None = None
    name: str = ""

    @classmethod
    def read(
        cls, path: Path, *, timeout_s: float, credentials: Credentials | None, name: str = ""
    ) -> Later:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            addresses = tuple(map(str, told["addresses"]))
            return cls(addresses, str(told["token"]), timeout_s, credentials, name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{path} does not say where the devices of the run are ({error}): a device of the "
                "run writes it when it starts"
            ) from error


def join_later(links: Links, host: Host) -> None:
    """Waits to be let in; then this device is one of the members, before the same batch."""
    later: Later = links.later
    wrap = unwrapped if later.credentials is None else encrypted(later.credentials)
    control = come_later(
        later.addresses, token=later.token, limit_s=later.timeout_s, wrap=wrap, name=later.name
    )
    links.become_member(control, later.timeout_s)
    recovery = links.recovery = Recovery(links, control)
    control.done, control.until = NEW, PROBATION
    recovery.is_inside = True
    while True:
        try:
            view, counts = control.next_view(links.epoch)
            regroup(links, control, view)
            host.net.follow([None] * links.devices)
            recovery.agree_on_weights()
            host.take(first_old(view, counts))
            break
        except Interrupted:
            continue
    recovery.is_inside = False
    control.done, control.until = max(counts.values()), probation(counts)
    links.later, recovery.host = None, host
    recovery.followers.add(host.net)

"""Shelves of a cluster: where the newest checkpoint of a run lies, and how devices come to it.

Devices keep checkpoints themselves, and what they had written when a run ended is collected here.
It is enough that one device has the newest: it gives it to the others when the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terrazzo.cluster.agent.shelf import PREFIX, newest
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import UsageError


def bring_checkpoint(hosts: SshHosts, run: Path, *, say: Callable[[str], None]) -> list[str]:
    """For each device the folder to go on from; what only the starter has is brought to one."""
    name = run.resolve().name
    places = [hosts.run_place(device, name) for device in range(len(hosts.names))]
    there = hosts.ask_all("shelf", [{"run": str(place)} for place in places])
    here = newest({"run": str(run.resolve())})
    for row in (*there, here):
        for path in row["damaged"]:
            say(f"a checkpoint is damaged, and passed over: {path}")
    _tell_absent(hosts, run, say)
    steps = [int(row["step"]) for row in there]
    best = max(int(here["step"]), *steps)
    if best < 0:
        raise UsageError(
            f"neither {run} nor the folders of that run on {', '.join(hosts.names)} hold a "
            "checkpoint that can be read: a script makes them with tz.Run(..., every=100)"
        )
    folders = [str(place / "checkpoints") for place in places]
    if best > max(steps):
        folders[0] = _send(hosts, here, name)
        say(f"going on from step {best}, which is brought to {hosts.names[0]}")
    else:
        say(f"going on from step {best}, which is on {hosts.names[steps.index(best)]}")
    return folders


def _send(hosts: SshHosts, found: dict[str, Any], name: str) -> str:
    """To a folder of its own on the first device, until the run ends."""
    base = hosts.run_place(0, f"resumed-{name}")
    target = base / "starter" / f"{PREFIX}{int(found['step']):08d}"
    hosts.copy(Path(found["path"]), device=0, destination=Path(target), removing=Path(base))
    return str(base)


def _tell_absent(hosts: SshHosts, run: Path, say: Callable[[str], None]) -> None:
    """Devices of that run which are not among these may have had a newer one."""
    try:
        rows = json.loads((run / "cluster.json").read_text(encoding="utf-8"))["devices"]
        before = {str(row["host"]) for row in rows}
    except (OSError, ValueError, LookupError, TypeError):
        return  # it was no run on real devices
    absent = sorted(before - {device.host for device in hosts.cluster.devices})
    if absent:
        say(f"not looked at, because not in this cluster: checkpoints on {', '.join(absent)}")

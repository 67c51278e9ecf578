"""Joining the other devices: torch.distributed from the launcher's environment."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from terrazzo.errors import LaunchError, PeerLost, UsageError
from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.slack import late_timers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTERS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "SLURM_JOB_ID": "Slurm",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
"""Variables by which starters that are not ours are known, the nearest one first."""


def join(environment: Mapping[str, str], *, timeout_s: float) -> bool:
    """Joins the process group that the environment describes; without one, stays alone.

    Gives whether it has joined one now.
    """
    if dist.is_available() and dist.is_initialized():
        return False
    if _number(environment, "WORLD_SIZE", default=1) <= 1:
        return False
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']} but {', '.join(missing)} is not set: start "
            "with terrazzo run --on N script.py, or with torchrun"
        )
    if not dist.is_available():
        raise LaunchError(
            "this build of torch has no torch.distributed: install one that has it (see the docs)"
        )
    # Only now: a build without torch.distributed has none.
    from torch.distributed.distributed_c10d import PrefixStore

    device, devices = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if device >= devices:
        raise UsageError(
            f"RANK is {device} and WORLD_SIZE is {devices}: devices are numbered from 0 to "
            f"{devices - 1}"
        )
    limit = timedelta(seconds=timeout_s)
    try:
        store = _meeting_point(environment, limit)
    except Exception as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise LaunchError(
            f"device {device} could not reach the meeting point {where} within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}): is device 0 running, is the address right, and is "
            "the port free?"
        ) from error
    _wait_for_all(PrefixStore("terrazzo/join", store), device, devices, timeout_s)
    with late_timers():
        dist.init_process_group(
            "gloo",
            store=PrefixStore("terrazzo", store),
            rank=device,
            world_size=devices,
            timeout=limit,
        )
    atexit.register(_part)
    return True


def told_without(environment: Mapping[str, str], devices: int) -> str:
    """What a user of another starter should know before a device is lost."""
    found = [name for variable, name in STARTERS.items() if variable in environment]
    by = f"by {found[0]}" if found else "without terrazzo run"
    return (
        f"{devices} devices, started {by}: when one is lost the run ends. terrazzo run goes on "
        "without it (docs/recovery.md)"
    )


def _part() -> None:
    """Ends the process group that was joined here: torch at the end of a process is too late."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r} in the environment: it must be a whole number")
    return int(text)


def _meeting_point(environment: Mapping[str, str], limit: timedelta) -> Store:
    """The store where devices find each other; device 0 hosts it, unless torchrun does."""
    from torch.distributed.rendezvous import rendezvous

    from terrazzo.runtime.store import meet

    device, devices = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(rendezvous("env://", device, devices, timeout=limit))[0]
        return store
    return meet(
        (environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
        device=device,
        devices=devices,
        limit=limit,
        credentials=Credentials.read(environment),
    )


def _wait_for_all(store: Store, device: int, devices: int, timeout_s: float) -> None:
    """Names who is missing, instead of failing to connect without a word."""
    if store.add(f"count of {device}", 1) > 1:
        raise LaunchError(
            f"another process has joined as device {device} of {devices}: give each its own RANK"
        )
    store.set(str(device), "here")
    missing = list(range(devices))
    deadline = time.monotonic() + timeout_s
    while missing:
        with contextlib.suppress(dist.DistError):
            missing = [other for other in missing if not store.check([str(other)])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(f"device {other}" for other in missing)
            raise LaunchError(
                f"{names} of {devices} did not join within {timeout_s:g} s: look at its output, "
                "or start with fewer devices"
            )
        if missing:
            time.sleep(0.02)


def tell_losses_shortly() -> None:
    """A script that ends because of another device has no fault to be looked for in it."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, PeerLost):
            print(f"terrazzo: PeerLost: {error}", file=sys.stderr, flush=True)
        else:
            usual(kind, error, trace)

    sys.excepthook = tell

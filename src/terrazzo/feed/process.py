"""Process: a child of the training process that ends with it, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

CAN_FORK = sys.platform == "linux"
"""Elsewhere processes cannot be forked safely, or not be made to end with their parent."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl: who trains may be killed, and connections that were inherited from it
must not stay open."""


def fork(target: Callable[..., None], *args: Any, name: str) -> Any:
    """Starts a process that has all that this one has now."""
    process = multiprocessing.get_context("fork").Process(
        target=target, args=args, name=name, daemon=True
    )
    # A process that is a daemon itself may have no children, lest they outlive it: these cannot.
    own: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    is_daemon = own.pop("daemon", None)
    try:
        with warnings.catch_warnings():  # about threads of this one, which the child never uses
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if is_daemon is not None:
            own["daemon"] = is_daemon
    return process


def die_with_parent() -> None:
    """A child calls this first; Ctrl-C is for the parent, who ends its children itself."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

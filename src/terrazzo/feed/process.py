"""Process: a child of the training process that ends with it, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

CAN_FORK = sys.platform == "linux"
"""Elsewhere processes cannot be forked safely, or not be made to end with their parent."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl: who trains may be killed, and connections that were inherited from it
must not stay open."""
LOOK_EVERY_S = 1.0


def fork(target: Callable[..., None], *args: Any, name: str, closes: Sequence[Any] = ()) -> Any:
    """Starts a process that has all that this one has now, less what it ``closes`` first."""
    # The signal comes when the thread ends that has forked, which may be long before the process.
    by_main = threading.current_thread() is threading.main_thread()
    process = multiprocessing.get_context("fork").Process(
        target=_begin, args=(os.getpid(), by_main, closes, target, args), name=name, daemon=True
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


def _begin(
    parent: int, by_main: bool, closes: Sequence[Any], target: Callable[..., None], args: Any
) -> None:
    """Ctrl-C is for the parent, who ends its children itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if by_main:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(0)
    for one in closes:
        one.close()
    target(*args)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os._exit(0)

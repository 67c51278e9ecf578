"""Network namespaces without names: they live as long as somebody holds them open.

Nothing is written to the file system and nothing is added to this machine's own network. When the
last holder dies, even by ``kill -9``, the kernel takes the namespace down with all its interfaces.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from terrazzo.errors import LabError

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
OWN = "/proc/thread-self/ns/net"
T = TypeVar("T")


def make_namespace() -> int:
    """A new one, as an open file; the caller closes it."""

    def leave() -> int:
        _call("unshare", NEW_NETWORK)
        return os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)

    return _in_a_thread(leave)


def inside(namespace: int, work: Callable[[], T]) -> T:
    """Does some work as a thread that has moved into the namespace."""

    def enter_and_work() -> T:
        _call("setns", namespace, NEW_NETWORK)
        return work()

    return _in_a_thread(enter_and_work)


def open_namespace(process: int, number: int) -> int:
    """The namespace that another process holds open as file ``number``."""
    path = f"/proc/{process}/fd/{number}"
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(
            f"cannot reach the network of the lab with process {process} ({path}: "
            f"{error.strerror}); is it still running? See terrazzo lab show"
        ) from error


def close_namespace(namespace: int) -> None:
    with suppress(OSError):
        os.close(namespace)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LabError(
            f"{name} of a network namespace was refused: {reason}. The lab needs root and a kernel "
            "with network namespaces; use sudo, or --unshaped for plain local processes"
        )


def _in_a_thread(work: Callable[[], T]) -> T:
    """Namespaces belong to threads: one that ends with its work leaves the others as they are."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]

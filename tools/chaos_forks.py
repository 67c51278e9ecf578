"""Forks: devices that are forked from a server with torch in it, for hosts of any kind.

Loading torch takes longer than a round, and whoever asks for forks need not load it: work is named
by module and function. A fork is one more Process to the launcher that users'
runs have; in the lab it enters the device's network, groups and mounts before it does anything.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from terrazzo.cluster.process import LineStream, Process

HERE = Path(__file__).parent
NEW_TIME, PARENT_DIES = 0x80, 1
UPTIME_S = 86400
"""Devices of a lab were started that much apart: their steady clocks tell different times."""
JOIN_S, ANSWER_S = 20.0, 600.0
COMPILER = "cc"


def jumping(folder: Path) -> Path | None:
    """A library with which the time of day can jump in forks; None without a C compiler."""
    made = folder / "jump.so"
    if shutil.which(COMPILER) is None:
        return None
    given = ["-shared", "-fPIC", "-O1", str(HERE / "jump.c"), "-ldl", "-lpthread"]
    subprocess.run([COMPILER, "-o", str(made), *given], check=True)
    return made


def server(library: Path | None) -> Any:
    """Where forks come from; they have loaded ``library`` before all others."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_warm"])
    if library is not None:
        os.environ["LD_PRELOAD"] = str(library)
    forkserver.ensure_running()
    os.environ.pop("LD_PRELOAD", None)
    return context


def asked_of(context: Any, work: str, *given: Any) -> Any:
    """What a function gives, in a fork."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, given))
    process.start()
    theirs.close()
    try:
        if not ours.poll(ANSWER_S):
            raise TimeoutError(f"{work} took more than {ANSWER_S:g} s")
        is_good, found = ours.recv()
    except EOFError:
        raise RuntimeError(f"{work} ended without an answer") from None
    finally:
        process.kill()
        process.join(JOIN_S)
    if not is_good:
        raise RuntimeError(found)
    return found


def _found(work: str) -> Callable[..., Any]:
    module, _, name = work.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _answer(pipe: Connection, work: str, given: Sequence[Any]) -> None:
    try:
        pipe.send((True, _found(work)(*given)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


class Fork(Process):
    """One device's process, as the launcher watches it."""

    def __init__(
        self, context: Any, work: str, given: Mapping[str, Any], *, device: int, name: str,
        environment: Mapping[str, str], place: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__(device=device, name=name)
        self._lock = threading.Lock()
        (out, to_out), (errors, to_errors) = (context.Pipe(duplex=False) for _ in range(2))
        told = (work, dict(given), dict(environment), list(place), device, to_out, to_errors)
        self._process = context.Process(target=_become, args=told)
        self._process.start()
        self.stdout, self.stderr = _stream(out), _stream(errors)
        for end in (out, errors, to_out, to_errors):
            end.close()

    def poll(self) -> int | None:
        with self._lock:
            if self.status is None:
                self.status = self._process.exitcode
            return self.status

    def signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.signal(signal.SIGCONT)
        self._process.join(JOIN_S)
        for stream in self.streams:
            stream.close()


def _stream(end: Connection) -> LineStream:
    return LineStream(os.fdopen(os.dup(end.fileno()), "rb", buffering=0))


def _become(
    work: str, given: dict[str, Any], environment: dict[str, str], place: list[str], device: int,
    out: Connection, errors: Connection,
) -> None:  # fmt: skip
    """Runs as a process of its own would, to its exit status."""
    ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    os.setsid()
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    out.close()
    errors.close()
    os.environ.clear()
    os.environ.update(environment)
    status = 0
    try:
        if place:
            _enter(place, device)
        _found(work)(**given)
    except BaseException as error:
        sys.last_value = error  # as the interpreter does for those who ask at the end
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _enter(place: list[str], device: int) -> None:
    """The device's network, names and groups, and a steady clock of its own."""
    from terrazzo.lab.enter import enter

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_TIME) != 0:
        print("chaos: NO CLOCK OF ITS OWN: this kernel has no time namespaces", file=sys.stderr)
    else:
        offset = f"monotonic {UPTIME_S * (device + 1)} 0"
        Path("/proc/self/timens_offsets").write_text(offset, encoding="ascii")
        number = os.open("/proc/self/ns/time_for_children", os.O_RDONLY)
        if libc.setns(number, NEW_TIME) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the device's time")
        os.close(number)
    enter(place[0], place[1], place[2], place[3:])


class ForkHosts:
    """Hosts of any kind, whose processes are forks that do ``work``, whatever the command."""

    def __init__(self, hosts: Any, context: Any, work: str, given: Mapping[str, Any]) -> None:
        self.hosts, self._context, self._work, self._given = hosts, context, work, given
        self.latest: dict[int, Fork] = {}
        """The process of every device; one that was started again in place of the first."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.hosts.names)

    def address(self, device: int) -> str:
        return str(self.hosts.address(device))

    def port(self) -> AbstractContextManager[int]:
        found: AbstractContextManager[int] = self.hosts.port()
        return found

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        return dict(self.hosts.environment(device, port=port, base=base))

    def run(self, command: Sequence[str], *, device: int, environment: Mapping[str, str]) -> Fork:
        place = self.hosts.place(device) if hasattr(self.hosts, "place") else []
        self.latest[device] = Fork(
            self._context, self._work, self._given, device=device, name=self.names[device],
            environment=environment, place=place,
        )  # fmt: skip
        return self.latest[device]

    def copy(self, source: Path, *, device: int, destination: Path) -> None:
        self.hosts.copy(source, device=device, destination=destination)

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        self.hosts.fetch(source, device=device, destination=destination)

    def kill(self, device: int) -> None:
        self.latest[device].signal(signal.SIGKILL)
        self.hosts.kill(device)

    def can_return(self, device: int, members: Path) -> bool:
        return bool(self.hosts.can_return(device, members))

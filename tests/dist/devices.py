"""Devices for tests: processes joined by gloo that stay alive between tests.

``run_on(3, function, *args)`` calls a module-level function on three devices at once and gives the
list of what each returned. Starting torch takes seconds, so processes are kept and reused; a
failure or a timeout ends them, and the next call starts fresh ones. They are forked from a server
that has loaded torch already, except those whose torch must load in another environment.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    "hypothesis", "pytest", "sklearn.datasets", "terrazzo.api", "torch._dynamo",
    "torch.export._trace", "torch.utils.data",
]  # fmt: skip
START = "forkserver"
"""How processes start: GPUs need "spawn"."""
_pools: dict[tuple[int, bool], Devices] = {}
_exports: list[tempfile.TemporaryDirectory[str]] = []


class DeviceError(AssertionError):
    """A function raised on some device; carries all tracebacks."""


def _load(path: str) -> Any:
    """A test module by file, the way both sides can find it."""
    name = "device_side_" + path.replace("/", "_").removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(
    pipe: Connection, environment: Mapping[str, str], timeout_s: float, exports: Path
) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist
    from exports import keep_exports

    import terrazzo as tz

    torch.set_num_threads(1)
    keep_exports(exports)
    tz.init(timeout_s=timeout_s)
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("done", getattr(_load(path), name)(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        pipe.send((*answer, dist.is_initialized() or int(environment["WORLD_SIZE"]) == 1))


def forking() -> Any:
    """Gives processes that begin with torch loaded; all of this pytest process share its server."""
    context = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


def exports_folder() -> Path:
    """Where the devices of this pytest process keep exports."""
    if not _exports:
        _exports.append(tempfile.TemporaryDirectory(prefix="terrazzo-exports-"))
    return Path(_exports[0].name)


def _started(
    context: Any, environment: Mapping[str, str], timeout_s: float
) -> tuple[Connection, Any]:
    ours, theirs = context.Pipe()
    given = (theirs, environment, timeout_s, exports_folder())
    process = context.Process(target=_serve, args=given, daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _loading(environment: Mapping[str, str], timeout_s: float) -> tuple[Connection, Any]:
    """A process that loads torch anew, in this environment."""
    saved = dict(os.environ)
    os.environ.update(environment)
    try:
        return _started(multiprocessing.get_context("spawn"), environment, timeout_s)
    finally:
        os.environ.clear()
        os.environ.update(saved)


class Devices:
    """A number of live processes."""

    def __init__(self, count: int, *, mixed: bool, timeout_s: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for device in range(count):
            environment = {
                "RANK": str(device),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            if mixed and device == count - 1:
                environment["ATEN_CPU_CAPABILITY"] = "default"
                ours, process = _loading(environment, timeout_s)
            else:
                ours, process = _started(forking(), environment, timeout_s)
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, path: str, name: str, args: Sequence[Sequence[Any]], timeout_s: float) -> Any:
        """Calls a function on all; ``args`` are the arguments of each."""
        try:
            for pipe, own in zip(self.pipes, args, strict=True):
                pipe.send((path, name, tuple(own)))
        except OSError as error:
            self.close()
            raise DeviceError(f"a device process ended before {name}: {error}") from error
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        for device, pipe in enumerate(self.pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                self.close()
                raise DeviceError(f"device {device} gave no answer within {timeout_s} s: {name}")
            try:
                answers.append(pipe.recv())
            except (EOFError, OSError):
                answers.append(("gone", f"device {device} ended", False))
        usable = all(answer[2] for answer in answers)
        failures = [
            f"--- device {device}\n{text}"
            for device, (kind, text, _) in enumerate(answers)
            if kind == "failed"
        ]
        if failures or not usable:
            self.close()
        if failures:
            raise DeviceError("\n".join(failures))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for key in [key for key, pool in _pools.items() if pool is self]:
            del _pools[key]


def run_on(
    devices: int,
    function: Callable[..., Any],
    *args: Any,
    mixed: bool = False,
    timeout_s: float = 150,
    per_device: Sequence[Sequence[Any]] | None = None,
) -> list[Any]:
    """What ``function(*args)`` gives on each device; ``mixed``: the last has other arithmetic."""
    key = (devices, mixed)
    if key not in _pools:
        _pools[key] = Devices(devices, mixed=mixed, timeout_s=60)
    path = function.__code__.co_filename
    given = per_device or [args] * devices
    return list(_pools[key].call(path, function.__qualname__, given, timeout_s))


def close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()
    while _exports:
        _exports.pop().cleanup()

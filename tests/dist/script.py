"""A script run as ``python script.py`` would, in a process that has loaded torch already."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from devices import forking


class Script:
    """One run of a script in a folder; what it prints is in ``printed``."""

    def __init__(
        self,
        path: Path,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        own = dict(environment or {})
        self.printed = folder / f"printed{own.get('RANK', '')}.txt"
        given = (path, list(arguments), folder, self.printed, own)
        self.process = forking().Process(target=_main, args=given, daemon=True)
        self.process.start()

    def finish(self, timeout_s: float = 200) -> str:
        """Waits; gives what it printed, or fails with it."""
        self.process.join(timeout_s)
        self.process.kill()
        text = self.printed.read_text(encoding="utf-8")
        assert self.process.exitcode == 0, f"exit status {self.process.exitcode}\n{text}"
        return text


def meeting(devices: int) -> list[dict[str, str]]:
    """The environments of scripts that are to find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(devices)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return [{**common, "RANK": str(device)} for device in range(devices)]


def together(path: Path, arguments: Sequence[str], *, folder: Path, devices: int) -> list[str]:
    """What a script prints on several devices, which under terrazzo run would all load torch."""
    scripts = [
        Script(path, arguments, folder=folder, environment=environment)
        for environment in meeting(devices)
    ]
    return [script.finish() for script in scripts]


def _main(
    path: Path, arguments: list[str], folder: Path, printed: Path, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(str(path), run_name="__main__")

"""An emulated board: an arm64 Python on a chosen Arm core, made in a folder and gone with it.

Packages are fetched with a private state of apt and only unpacked: nothing is installed on this
machine, no architecture is added to it, and no rights are needed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheels import pip, target

PYTHON_PACKAGES = ("python3-minimal", "python3", "libstdc++6", "libgomp1")
TOOLS = ("apt-get", "dpkg", "dpkg-deb")


class NoBoard(Exception):
    """The emulation cannot be set up on this machine; says why."""


@dataclass(frozen=True)
class Board:
    """Runs arm64 programs from ``root`` with an emulator that knows one core's instructions."""

    emulator: Path
    root: Path
    site: Path
    core: str

    @property
    def python(self) -> Path:
        return next(p for p in sorted(self.root.glob("usr/bin/python3.*")) if p.name[8:].isdigit())

    @property
    def python_version(self) -> str:
        return self.python.name.removeprefix("python")

    def install(self, requirements: Sequence[str], *options: str, pins: Path | None = None) -> None:
        """Unpacks wheels for the board's Python."""
        chosen = ["install", "--quiet", "--target", str(self.site), "--upgrade", *options]
        pip([*chosen, *target(self.python_version), *requirements], constraints=pins)

    def start(
        self, arguments: Sequence[str], *, path: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts the board's Python; ``path`` is searched for modules before its site folder."""
        command = [self.emulator, "-cpu", self.core, "-L", self.root, self.python, "-B"]
        environment = {**os.environ, **(env or {}), "PYTHONPATH": f"{path}:{self.site}"}
        return subprocess.Popen(
            [*map(str, command), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, arguments: Sequence[str], *, path: Path) -> tuple[int, str]:
        """Runs the board's Python to its end; gives the exit status and what it printed."""
        process = self.start(arguments, path=path)
        output, _ = process.communicate()
        return process.returncode, output


def make_board(folder: Path, *, core: str) -> Board:
    """Fetches and unpacks the emulator and an arm64 Python into a folder."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoBoard(f"needs Debian's package tools, and there is no {', '.join(missing)}")
    native = _read(["dpkg", "--print-architecture"])
    emulator = _unpacked(folder / "emulator", native, ["qemu-user-static"], closed=False)
    root = _unpacked(folder / "root", "arm64", PYTHON_PACKAGES, closed=True)
    board = Board(emulator / "usr/bin/qemu-aarch64-static", root, folder / "site", core)
    status, output = board.run(["-c", "import platform; print(platform.machine())"], path=folder)
    if status or output.strip() != "aarch64":
        raise NoBoard(f"the emulated Python does not start ({status}): {output.strip()[-300:]}")
    return board


def is_arm64() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def _unpacked(folder: Path, architecture: str, packages: Sequence[str], *, closed: bool) -> Path:
    """Debian packages of an architecture, unpacked; ``closed``: with all they depend on."""
    state, root = folder / "apt", folder / "unpacked"
    for part in ("lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True)
    (state / "status").touch()  # nothing is installed, so everything is fetched
    settings = state / "apt.conf"
    settings.write_text(
        f'APT::Architecture "{architecture}"; APT::Architectures {{ "{architecture}"; }};\n'
        f'APT::Sandbox::User "";\nDir::State "{state}"; Dir::State::status "{state}/status";\n'
        f'Dir::Cache "{state}/cache";\n'
    )
    apt = {**os.environ, "APT_CONFIG": str(settings), "DEBIAN_FRONTEND": "noninteractive"}
    _read(["apt-get", "update"], env=apt)
    if closed:
        options = ["--yes", "--download-only", "--no-install-recommends"]
        _read(["apt-get", "install", *options, *packages], env=apt)
    else:
        _read(["apt-get", "download", *packages], env=apt, cwd=state / "cache/archives")
    archives = sorted((state / "cache/archives").glob("*.deb"))
    if not archives:
        raise NoBoard(f"apt fetched nothing for {', '.join(packages)} ({architecture})")
    for archive in archives:
        _read(["dpkg-deb", "--extract", str(archive), str(root)])
    return root


def _read(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        reason = " ".join(lines) or done.stderr.strip()[-300:]
        raise NoBoard(f"{' '.join(command[:2])} failed: {reason}")
    return done.stdout.strip()

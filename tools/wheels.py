"""The wheels that pip would install on a 64-bit Arm board: found, downloaded and weighed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

# The oldest systems in reach have glibc 2.35 (JetPack 6); what asks for 2.28 or less runs on all.
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 29)))
NOT_FOUND = ("No matching distribution", "Could not find a version")


class NoWheel(Exception):
    """A requirement that no wheel for the board satisfies."""


class NoAnswer(Exception):
    """pip failed for another reason: no network, say. It tells nothing about the wheels."""


@dataclass(frozen=True)
class Wheel:
    """One downloaded file and what it asks for."""

    name: str
    version: str
    size_bytes: int
    requires: tuple[Requirement, ...]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            message = message_from_bytes(archive.read(metadata))
        requires = tuple(Requirement(text) for text in message.get_all("Requires-Dist", []))
        return cls(name, str(version), path.stat().st_size, requires)


def closure(requirements: Sequence[Requirement], python: str) -> list[Wheel]:
    """Everything these requirements install on a board with this Python, sorted by name.

    pip answers markers such as ``python_version < "3.11"`` for the Python it runs in, not for the
    one it downloads for, so they are answered here again, and what pip left out is asked for.
    """
    wanted = {str(requirement) for requirement in requirements}
    with tempfile.TemporaryDirectory(prefix="terrazzo-wheels-") as folder:
        while True:
            _download(sorted(wanted), python, Path(folder))
            wheels = {w.name: w for w in map(Wheel.read, Path(folder).glob("*.whl"))}
            reached, missing = _reached(requirements, wheels, _board(python))
            if not missing:
                return [wheels[name] for name in sorted(reached)]
            wanted |= missing


def _reached(
    requirements: Iterable[Requirement], wheels: Mapping[str, Wheel], board: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """The wheels that are truly needed on the board, and requirements that no wheel here meets."""
    reached: set[str] = set()
    missing: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**board, "extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in reached:
            continue
        if name not in wheels:
            missing.add(f"{requirement.name}{requirement.specifier}")
            continue
        reached.add(name)
        waiting += wheels[name].requires
    return reached, missing


def _board(python: str) -> dict[str, str]:
    """What markers ask about, for a board."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "aarch64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def target(python: str) -> list[str]:
    """pip's options for a board with this Python: wheels only, nothing is built."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def pip(arguments: Sequence[str], *, constraints: Path | None = None) -> None:
    """Runs pip, with pins or free of any that the environment sets."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("CONSTRAINT")}
    if constraints:
        environment["PIP_CONSTRAINT"] = str(constraints)
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    text = " ".join(reason) or done.stderr.strip()
    raise (NoWheel if any(words in text for words in NOT_FOUND) else NoAnswer)(text)


def _download(requirements: Sequence[str], python: str, folder: Path) -> None:
    # Without pins: a board takes the newest versions that the ranges allow.
    pip(["download", "--quiet", "--dest", str(folder), *target(python), *requirements])

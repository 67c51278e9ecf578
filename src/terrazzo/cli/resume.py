"""``terrazzo run --resume RUN``: another run's script, arguments and place, and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terrazzo.cluster import Hosts
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import UsageError
from terrazzo.records.run import RunFolder

RESUME = "TERRAZZO_RESUME"
"""The variable in which ``terrazzo.init`` finds the checkpoints; the same name as there."""
FLAG, VERB = "--resume", "run"
VALUED = ("--on", "--grace", "--restarts", "--run-dir", "--presets", "--plan", FLAG)
"""Options of ``terrazzo run`` that a value follows."""


def completed(words: Sequence[str]) -> list[str]:
    """A command line with the script of the run that it goes on with, unless it names one."""
    found = list(words)
    if not found or found[0] != VERB or not any(w.split("=")[0] == FLAG for w in found):
        return found
    options, rest = _options(found[1:])
    folder = options.get(FLAG)
    if folder is None or rest:
        return found
    before = RunFolder(Path(folder)).read()
    if before is None:
        raise UsageError(f"{folder} holds no run: give a folder that terrazzo run made")
    if "--on" not in options:
        found[1:1] = ["--on", before.on or str(before.devices)]
    return [*found, *before.command[1:]]


def _options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options before a script, and what follows them."""
    found: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        name, sign, value = left.pop(0).partition("=")
        if name in VALUED and not sign:
            value = left.pop(0) if left else ""
        found[name] = value
    return found, left


def environment(folder: Path, hosts: Hosts) -> dict[str, str]:
    """What tells devices where the checkpoints of a run are."""
    if isinstance(hosts, SshHosts):
        raise UsageError(
            f"--resume {folder}: checkpoints of real devices lie on those devices. Give tz.Run a "
            "folder there, checkpoints=, and call run.resume() before run.epochs()"
        )
    path = folder / "checkpoints"
    if not any(path.glob("*/step-*")):
        raise UsageError(
            f"{folder} holds no checkpoint: a script makes them with tz.Run(..., every=100)"
        )
    return {RESUME: str(path.resolve())}

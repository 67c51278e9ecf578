"""``terrazzo run --resume RUN``: another run's script, arguments and place, and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terrazzo.cli.place import say
from terrazzo.cluster import Hosts
from terrazzo.cluster.shelves import bring_checkpoint
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


def environments(folder: Path, hosts: Hosts) -> list[dict[str, str]]:
    """What tells each device where the checkpoints of a run are."""
    if isinstance(hosts, SshHosts):
        return [{RESUME: place} for place in bring_checkpoint(hosts, folder, say=say)]
    path = folder / "checkpoints"
    if not any(path.glob("*/step-*")):
        raise UsageError(f"{folder} holds no checkpoint: {_reason(folder)}")
    return [{RESUME: str(path.resolve())}] * len(hosts.names)


def _reason(folder: Path) -> str:
    if (folder / "cluster.json").exists():
        return "it ran on real devices, which keep theirs: name them, --on cluster.toml"
    return "a script makes them with tz.Run(..., every=100)"

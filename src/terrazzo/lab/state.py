"""What a running lab tells about itself, in a file that outlives its process.

A lab's name says who made it: the process, when that process began, and a count. So a lab whose
maker is dead can be told from one that runs, also where only a name is left of it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import LabError, UsageError
from terrazzo.lab.topology import Topology
from terrazzo.records import document

KIND, VERSION = "lab", 1
FOLDER = Path("/run/terrazzo")
COUNT = itertools.count()


@dataclass(frozen=True, slots=True)
class LabState:
    """A lab as other processes need to know it."""

    lab: str
    process: int
    topology: str
    namespaces: tuple[int, ...]
    """The files, of the lab's process, that hold the switch's and the devices' namespaces."""
    cores: float
    """What its devices together may use of this machine."""
    run_folder: str = ""

    def write(self, folder: Path = FOLDER) -> None:
        try:
            document.write(_path(folder, self.lab), document.dump(KIND, VERSION, asdict(self)))
        except OSError as error:
            raise LabError(f"cannot write the lab's state to {folder}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> LabState:
        body: dict[str, Any] = document.parse(path.read_text(encoding="utf-8"), KIND, VERSION)
        with document.reading(KIND):
            return cls(
                lab=body["lab"],
                process=body["process"],
                topology=body["topology"],
                namespaces=tuple(body["namespaces"]),
                cores=body["cores"],
                run_folder=body["run_folder"],
            )

    @property
    def devices(self) -> Topology:
        return Topology.from_json(self.topology)


def new_name() -> str:
    """A name that no other lab has had: of this process, at its time."""
    process = os.getpid()
    return f"{_process_space()}-{process}-{_began(process)}-{next(COUNT)}"


def is_alive(lab: str) -> bool:
    """Whether the process that made the lab still runs.

    True also for what cannot be judged from here, such as a lab of another container: it is not
    ours to remove.
    """
    try:
        space, process, began, _ = map(int, lab.split("-"))
    except ValueError:
        return True  # no name that a lab gives
    return space != _process_space() or _began(process) == began


def states(folder: Path = FOLDER) -> list[LabState]:
    """The labs that run."""
    found = []
    for path in sorted(folder.glob("lab-*.json")):
        try:
            found.append(LabState.read(path))
        except (OSError, UsageError):
            continue  # removed in the meantime, or of another version: none of ours
    return [state for state in found if is_alive(state.lab)]


def names(folder: Path = FOLDER) -> set[str]:
    """The labs that have a file here, alive or not."""
    return {path.name[len("lab-") : -len(".json")] for path in folder.glob("lab-*.json")}


def forget(lab: str, folder: Path = FOLDER) -> None:
    hosts_file(lab, folder).unlink(missing_ok=True)
    _path(folder, lab).unlink(missing_ok=True)


def hosts_file(lab: str, folder: Path = FOLDER) -> Path:
    """What the lab's devices find as /etc/hosts."""
    return folder / f"hosts-{lab}"


@contextmanager
def alone(folder: Path = FOLDER) -> Iterator[None]:
    """While the block runs, no other lab is started or cleaned on this machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise LabError(
            f"the lab keeps its state in {folder}, which is not writable ({error.strerror}); it "
            "needs root: use sudo, or --unshaped for plain local processes"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path(folder: Path, lab: str) -> Path:
    return folder / f"lab-{lab}.json"


def _process_space() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _began(process: int) -> int | None:
    """When a process began, in ticks since the machine started; None if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])

"""Control groups: what each device may use, and what it has used, for both versions of the kernel.

A lab's groups stand under one group of its own, named after the lab:

    terrazzo-<lab>/<device>

in each of the kernel's hierarchies (version 1) or in the only one (version 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from terrazzo.errors import LabError
from terrazzo.lab import kernelfile
from terrazzo.lab.quota import CpuQuota

PREFIX = "terrazzo-"
MOUNTS = Path("/proc/self/mounts")
NEEDED = ("cpu", "memory")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a device has used since it was made (peak: since the last reset)."""

    memory_bytes: int
    peak_bytes: int
    limit_bytes: int
    cpu_s: float
    throttled_s: float
    killed: int
    """How many processes the kernel ended because memory was full."""
    cache_bytes: int = 0
    """Pages of files among the memory, which the kernel gives up before it ends anybody."""
    kernel_bytes: int = 0
    """The kernel's own among the memory: tables of pages and, in version 2 alone, sockets."""

    @property
    def processes_bytes(self) -> int:
        """What processes hold themselves: the same in both versions of the kernel's groups."""
        return self.memory_bytes - self.cache_bytes - self.kernel_bytes

    @property
    def processes_peak_bytes(self) -> int:
        """The most of it, where files and the kernel had no more at that moment than now."""
        return max(self.peak_bytes - self.cache_bytes - self.kernel_bytes, 0)


def cached_bytes(stat: Path) -> int:
    """Pages of files in a group, by its table of kinds of memory; both versions name them alike."""
    if not stat.exists():
        return 0
    kinds = kernelfile.table(stat)
    return kinds.get("active_file", 0) + kinds.get("inactive_file", 0)


def kernel_bytes(stat: Path) -> int:
    """The kernel's own memory in a group of version 2."""
    if not stat.exists():
        return 0
    kinds = kernelfile.table(stat)
    parts = ("slab", "kernel_stack", "pagetables", "percpu")
    own = kinds.get("kernel", sum(kinds.get(part, 0) for part in parts))  # since Linux 5.18
    return own + kinds.get("sock", 0)


class Group(Protocol):
    """The limits and counters of one device."""

    @property
    def joining(self) -> tuple[Path, ...]:
        """Files into which a process writes its number to live inside the device."""

    def limit_cpu(self, quota: CpuQuota | None) -> None:
        """None takes the limit away."""

    def limit_memory(self, limit_bytes: int) -> None: ...

    def limit_storage(
        self,
        disk: str,
        *,
        read_bytes_per_s: int = 0,
        write_bytes_per_s: int = 0,
        reads_per_s: int = 0,
    ) -> None:
        """``disk`` is major:minor, as the kernel numbers it; what is 0 is not limited."""

    def freeze(self, frozen: bool) -> None: ...

    def processes(self) -> list[int]: ...

    def usage(self) -> Usage: ...

    def reset_peak(self) -> bool:
        """Whether the peak counts from now: version 2 can forget one only since Linux 6.12."""


class Groups(Protocol):
    """The kernel's groups, as far as labs are concerned."""

    @property
    def version(self) -> int: ...

    @property
    def can_freeze(self) -> bool: ...

    @property
    def can_limit_storage(self) -> bool: ...

    def make(self, lab: str, names: tuple[str, ...]) -> None:
        """Makes the groups of a lab, which go before everybody else on this machine."""

    def device(self, lab: str, name: str) -> Group: ...

    def labs(self) -> set[str]:
        """The labs that have groups, alive or not."""

    def processes(self, lab: str) -> list[int]:
        """Every process in any group of the lab."""

    def thaw(self, lab: str) -> None:
        """A frozen process can't be ended."""

    def remove(self, lab: str) -> None:
        """Removes the groups of a lab; there must be no process left. Again is no harm."""


def find_groups(mounts: Path = MOUNTS) -> Groups:
    """The version that this machine's controllers are mounted in."""
    from terrazzo.lab.groups1 import Groups1
    from terrazzo.lab.groups2 import Groups2

    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2":
            v2 = Path(place)
        elif kind == "cgroup":
            v1 |= {option: Path(place) for option in options.split(",")}
    if all(name in v1 for name in NEEDED):
        return Groups1({name: v1[name] for name in Groups1.used if name in v1})
    if v2 is not None:
        offered = (v2 / "cgroup.controllers").read_text(encoding="ascii").split()
        if all(name in offered for name in NEEDED):
            return Groups2(v2, frozenset(offered))
    raise LabError(
        "this machine offers no control groups for cpu and memory (/proc/self/mounts names none): "
        "quotas and memory limits cannot be made. Mount them, run the lab outside a container, or "
        "use --unshaped"
    )


def make_folder(path: Path) -> None:
    """Makes one group; the kernel fills its folder with files."""
    try:
        path.mkdir()
    except OSError as error:
        raise LabError(f"cannot make the control group {path}: {error.strerror}") from error


def remove_folder(path: Path) -> None:
    """Removes one group, if it is still there."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise LabError(
            f"cannot remove the control group {path}: {error.strerror}; processes inside: "
            f"{processes_in(path) or 'none'}. Run terrazzo lab clean again"
        ) from error


def processes_in(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text("ascii").split()]
    except OSError:  # removed in the meantime
        return []

"""Control groups, version 2: one hierarchy, controllers handed down from group to group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import LabError
from terrazzo.lab import kernelfile
from terrazzo.lab.groups import (
    PREFIX,
    Usage,
    cached_bytes,
    kernel_bytes,
    make_folder,
    processes_in,
    remove_folder,
)
from terrazzo.lab.quota import CpuQuota

FIRST = 10_000
"""The largest weight there is: a lab's devices are throttled by their quotas, not by strangers."""
NO_PEAK = 0


@dataclass(frozen=True, slots=True)
class Group2:
    """The group of one device."""

    folder: Path
    peaks: dict[Path, int] = field(default_factory=dict, compare=False)
    """Files of memory.peak held open: a peak is forgotten only for who reads through the same."""

    @property
    def joining(self) -> tuple[Path, ...]:
        return (self.folder / "cgroup.procs",)

    def limit_cpu(self, quota: CpuQuota | None) -> None:
        self._save(0)
        text = f"max {100_000}" if quota is None else f"{quota.quota_us} {quota.period_us}"
        kernelfile.set_to(self.folder / "cpu.max", text)
        if quota is not None:
            self._save(quota.saved_us)

    def _save(self, most_us: int) -> None:
        path = self.folder / "cpu.max.burst"
        if path.exists():  # since Linux 5.14
            kernelfile.set_to(path, str(most_us))

    def limit_memory(self, limit_bytes: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        kernelfile.set_to(self.folder / "memory.max", str(limit_bytes // page * page))
        if (self.folder / "memory.swap.max").exists():  # not there on a machine without swap
            kernelfile.set_to(self.folder / "memory.swap.max", "0")

    def limit_storage(
        self,
        disk: str,
        *,
        read_bytes_per_s: int = 0,
        write_bytes_per_s: int = 0,
        reads_per_s: int = 0,
    ) -> None:
        limits = {"rbps": read_bytes_per_s, "wbps": write_bytes_per_s, "riops": reads_per_s}
        kept = [f"{name}={limit or 'max'}" for name, limit in limits.items()]
        text = " ".join([disk, *kept, "wiops=max"])
        # Of a disk without any limit the kernel keeps no line.
        kernelfile.set_to(
            self.folder / "io.max", text, seen_as=text if any(limits.values()) else ""
        )

    def freeze(self, frozen: bool) -> None:
        kernelfile.set_to(self.folder / "cgroup.freeze", "1" if frozen else "0")

    def processes(self) -> list[int]:
        return processes_in(self.folder)

    def usage(self) -> Usage:
        limit = kernelfile.read(self.folder / "memory.max")
        cpu = kernelfile.table(self.folder / "cpu.stat")
        return Usage(
            memory_bytes=int(kernelfile.read(self.folder / "memory.current")),
            peak_bytes=self._peak_bytes(),
            limit_bytes=int(limit) if limit.isdigit() else 0,
            cpu_s=cpu.get("usage_usec", 0) * 1e-6,
            throttled_s=cpu.get("throttled_usec", 0) * 1e-6,
            killed=kernelfile.table(self.folder / "memory.events").get("oom_kill", 0),
            cache_bytes=cached_bytes(self.folder / "memory.stat"),
            kernel_bytes=kernel_bytes(self.folder / "memory.stat"),
        )

    def _peak_bytes(self) -> int:
        path = self.folder / "memory.peak"
        if path in self.peaks:
            return int(os.pread(self.peaks[path], 64, 0))
        # Kernels before 5.19 keep no peak: better none than a wrong one.
        return int(kernelfile.read(path)) if path.exists() else NO_PEAK

    def reset_peak(self) -> bool:
        path = self.folder / "memory.peak"
        try:
            number = self.peaks[path] if path in self.peaks else os.open(path, os.O_RDWR)
        except OSError:  # before 5.19
            return False
        try:
            os.pwrite(number, b"0", 0)  # any text will do
        except OSError:  # before 6.12
            os.close(number)
            return False
        self.peaks[path] = number
        return True


@dataclass(frozen=True, slots=True)
class Groups2:
    """The hierarchy of this machine, and the controllers it offers."""

    root: Path
    offered: frozenset[str]
    make_folder: Callable[[Path], None] = make_folder
    version: int = 2
    peaks: dict[Path, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def can_freeze(self) -> bool:
        return True

    @property
    def can_limit_storage(self) -> bool:
        return "io" in self.offered

    def make(self, lab: str, names: tuple[str, ...]) -> None:
        own = self.root / f"{PREFIX}{lab}"
        self._hand_down(self.root)
        self.make_folder(own)
        self._hand_down(own)
        kernelfile.set_to(own / "cpu.weight", str(FIRST))
        for name in names:
            self.make_folder(own / name)

    def device(self, lab: str, name: str) -> Group2:
        return Group2(self.root / f"{PREFIX}{lab}" / name, self.peaks)

    def labs(self) -> set[str]:
        return {path.name[len(PREFIX) :] for path in self.root.glob(f"{PREFIX}*") if path.is_dir()}

    def processes(self, lab: str) -> list[int]:
        return sorted({pid for path in self._folders(lab) for pid in processes_in(path)})

    def thaw(self, lab: str) -> None:
        for path in (self.root / f"{PREFIX}{lab}").glob("*/cgroup.freeze"):
            kernelfile.write(path, "0")

    def remove(self, lab: str) -> None:
        for path in self._folders(lab):
            with suppress(KeyError):
                os.close(self.peaks.pop(path / "memory.peak"))
            remove_folder(path)

    def _hand_down(self, folder: Path) -> None:
        """Makes the controllers we use known one level below; what is there already stays."""
        path = folder / "cgroup.subtree_control"
        wanted = [name for name in ("cpu", "memory", "io") if name in self.offered]
        missing = [name for name in wanted if name not in kernelfile.read(path).split()]
        if missing:
            kernelfile.write(path, " ".join(f"+{name}" for name in missing))
        held = kernelfile.read(path).split()
        if not {"cpu", "memory"} <= set(held):
            raise LabError(f"{path} holds {' '.join(held)!r}: cpu and memory cannot be limited")

    def _folders(self, lab: str) -> Iterator[Path]:
        own = self.root / f"{PREFIX}{lab}"
        if own.is_dir():
            yield from (path for path in own.iterdir() if path.is_dir())
            yield own

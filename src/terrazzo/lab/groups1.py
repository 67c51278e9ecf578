"""Control groups, version 1: one hierarchy for each controller."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from terrazzo.lab import kernelfile
from terrazzo.lab.groups import (
    PREFIX,
    Usage,
    cached_bytes,
    make_folder,
    processes_in,
    remove_folder,
)
from terrazzo.lab.quota import CpuQuota

FIRST = 262_144
"""The most shares there are: a lab's devices are throttled by their quotas, not by strangers."""


@dataclass(frozen=True, slots=True)
class Group1:
    """The groups of one device."""

    folders: Mapping[str, Path]

    @property
    def joining(self) -> tuple[Path, ...]:
        return tuple(folder / "cgroup.procs" for folder in self.folders.values())

    def limit_cpu(self, quota: CpuQuota | None) -> None:
        cpu = self.folders["cpu"]
        self._save(0)
        kernelfile.set_to(cpu / "cpu.cfs_quota_us", "-1")
        if quota is not None:
            kernelfile.set_to(cpu / "cpu.cfs_period_us", str(quota.period_us))
            kernelfile.set_to(cpu / "cpu.cfs_quota_us", str(quota.quota_us))
            self._save(quota.saved_us)

    def _save(self, most_us: int) -> None:
        path = self.folders["cpu"] / "cpu.cfs_burst_us"
        if path.exists():  # since Linux 5.14
            kernelfile.set_to(path, str(most_us))

    def limit_memory(self, limit_bytes: int) -> None:
        memory, limit = self.folders["memory"], str(_whole_pages(limit_bytes))
        kernelfile.set_to(memory / "memory.limit_in_bytes", limit)
        if (memory / "memory.memsw.limit_in_bytes").exists():  # memory and swap together
            kernelfile.set_to(memory / "memory.memsw.limit_in_bytes", limit)
        else:
            kernelfile.set_to(memory / "memory.swappiness", "0")

    def limit_storage(
        self,
        disk: str,
        *,
        read_bytes_per_s: int = 0,
        write_bytes_per_s: int = 0,
        reads_per_s: int = 0,
    ) -> None:
        limits = {
            "read_bps": read_bytes_per_s,
            "write_bps": write_bytes_per_s,
            "read_iops": reads_per_s,
        }
        for name, limit in limits.items():
            if limit:
                path = self.folders["blkio"] / f"blkio.throttle.{name}_device"
                kernelfile.set_to(path, f"{disk} {limit}")

    def freeze(self, frozen: bool) -> None:
        # Asked for FROZEN it answers FREEZING until every thread has stopped.
        kernelfile.write(
            self.folders["freezer"] / "freezer.state", "FROZEN" if frozen else "THAWED"
        )

    def processes(self) -> list[int]:
        folders = self.folders.values()
        return sorted({pid for folder in folders for pid in processes_in(folder)})

    def usage(self) -> Usage:
        memory, cpu = self.folders["memory"], self.folders["cpu"]
        numbers = {
            name: int(kernelfile.read(memory / f"memory.{name}_in_bytes"))
            for name in ("usage", "max_usage", "limit")
        }
        kernel = memory / "memory.kmem.usage_in_bytes"  # gone where this memory is not counted
        time_s = 0.0
        if "cpuacct" in self.folders:
            time_s = int(kernelfile.read(self.folders["cpuacct"] / "cpuacct.usage")) * 1e-9
        return Usage(
            memory_bytes=numbers["usage"],
            peak_bytes=numbers["max_usage"],
            limit_bytes=numbers["limit"],
            cpu_s=time_s,
            throttled_s=kernelfile.table(cpu / "cpu.stat").get("throttled_time", 0) * 1e-9,
            killed=kernelfile.table(memory / "memory.oom_control").get("oom_kill", 0),
            cache_bytes=cached_bytes(memory / "memory.stat"),
            kernel_bytes=int(kernelfile.read(kernel)) if kernel.exists() else 0,
        )

    def reset_peak(self) -> bool:
        kernelfile.write(self.folders["memory"] / "memory.max_usage_in_bytes", "0")
        return True


@dataclass(frozen=True, slots=True)
class Groups1:
    """The hierarchies of this machine, by controller."""

    mounts: Mapping[str, Path]
    version: int = 1
    used: ClassVar[tuple[str, ...]] = ("cpu", "cpuacct", "memory", "freezer", "blkio")

    @property
    def can_freeze(self) -> bool:
        return "freezer" in self.mounts

    @property
    def can_limit_storage(self) -> bool:
        return "blkio" in self.mounts

    def make(self, lab: str, names: tuple[str, ...]) -> None:
        for mount in self._places():
            make_folder(mount / f"{PREFIX}{lab}")
            for name in names:
                make_folder(mount / f"{PREFIX}{lab}" / name)
        kernelfile.set_to(self.mounts["cpu"] / f"{PREFIX}{lab}" / "cpu.shares", str(FIRST))

    def device(self, lab: str, name: str) -> Group1:
        mounts = self.mounts.items()
        return Group1({controller: path / f"{PREFIX}{lab}" / name for controller, path in mounts})

    def labs(self) -> set[str]:
        found = (path for mount in self._places() for path in mount.glob(f"{PREFIX}*"))
        return {path.name[len(PREFIX) :] for path in found if path.is_dir()}

    def processes(self, lab: str) -> list[int]:
        return sorted({pid for folder in self._folders(lab) for pid in processes_in(folder)})

    def thaw(self, lab: str) -> None:
        if self.can_freeze:
            for path in (self.mounts["freezer"] / f"{PREFIX}{lab}").glob("*/freezer.state"):
                kernelfile.write(path, "THAWED")

    def remove(self, lab: str) -> None:
        for path in self._folders(lab):
            remove_folder(path)

    def _places(self) -> list[Path]:
        return list(dict.fromkeys(path.resolve() for path in self.mounts.values()))

    def _folders(self, lab: str) -> Iterator[Path]:
        """The lab's groups, a device's before the one it stands in."""
        for mount in self._places():
            own = mount / f"{PREFIX}{lab}"
            if own.is_dir():
                yield from (path for path in own.iterdir() if path.is_dir())
                yield own


def _whole_pages(count: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return count // page * page

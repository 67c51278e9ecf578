"""Control groups: the version found, and version 2 against a folder that mimics the kernel's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from terrazzo.errors import LabError
from terrazzo.lab import kernelfile, state
from terrazzo.lab.clean import remove_dead
from terrazzo.lab.groups import find_groups
from terrazzo.lab.groups1 import Groups1
from terrazzo.lab.groups2 import Group2, Groups2
from terrazzo.lab.quota import CpuQuota

sys.path.insert(0, str(Path(__file__).parent))
from kerneltree import empty, fill, make, tree


@pytest.fixture
def group(tmp_path: Path) -> Group2:
    fill(tmp_path)
    return Group2(tmp_path)


class TestFinding:
    def test_version_1(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text("a /c/cpu cgroup rw,cpu,cpuacct 0 0\nb /c/memory cgroup rw,memory 0 0\n")
        found = find_groups(mounts)
        assert isinstance(found, Groups1)
        assert found.mounts["cpuacct"] == found.mounts["cpu"] == Path("/c/cpu")
        assert not found.can_freeze

    def test_version_2(self, tmp_path: Path) -> None:
        fill(tmp_path)
        mounts = tmp_path / "mounts"
        mounts.write_text(f"c {tmp_path} cgroup2 rw 0 0\n")
        found = find_groups(mounts)
        assert isinstance(found, Groups2)
        assert found.can_limit_storage

    def test_neither(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text("tmpfs / tmpfs rw 0 0\n")
        with pytest.raises(LabError, match="no control groups for cpu and memory"):
            find_groups(mounts)


class TestVersion2:
    def test_limits(self, group: Group2) -> None:
        group.limit_cpu(CpuQuota(1_500, 10_000))
        # A file does not forget what a longer text had after it; the kernel's do.
        assert (group.folder / "cpu.max").read_text() == "1500 10000"
        assert (group.folder / "cpu.max.burst").read_text() == "1500"

    def test_no_limit(self, group: Group2) -> None:
        group.limit_cpu(None)
        assert (group.folder / "cpu.max").read_text() == "max 100000"

    def test_memory_in_whole_pages_and_no_swap(self, group: Group2) -> None:
        group.limit_memory((900 << 20) + 17)
        assert (group.folder / "memory.max").read_text() == str(900 << 20)
        assert (group.folder / "memory.swap.max").read_text() == "0"

    def test_freeze(self, group: Group2) -> None:
        group.freeze(True)
        assert (group.folder / "cgroup.freeze").read_text() == "1"

    def test_usage(self, group: Group2) -> None:
        usage = group.usage()
        assert (usage.memory_bytes, usage.peak_bytes, usage.limit_bytes) == (4096, 8192, 0)
        assert (usage.cpu_s, usage.throttled_s, usage.killed) == (2.5, 1.0, 3)

    def test_files_and_the_kernel_are_not_memory_of_processes(self, group: Group2) -> None:
        usage = group.usage()
        assert (usage.processes_bytes, usage.processes_peak_bytes) == (2596, 6692)

    def test_kernels_that_do_not_sum_up_their_own(self, group: Group2) -> None:
        parts = "slab 100\nkernel_stack 20\npagetables 3\npercpu 4\nsock 200"
        (group.folder / "memory.stat").write_text(parts)
        assert group.usage().kernel_bytes == 327

    def test_a_peak_is_forgotten_and_read_through_one_open_file(self, tmp_path: Path) -> None:
        """As Linux 6.12 does it: who opens the file anew still finds the old peak."""
        groups = tree(tmp_path)
        groups.make("1-2-3-0", ("pi3-0",))
        peak = tmp_path / "terrazzo-1-2-3-0" / "pi3-0" / "memory.peak"
        assert groups.device("1-2-3-0", "pi3-0").reset_peak()
        assert peak.read_text() == "0192"  # written in place: 8192 with its first digit gone
        peak.unlink()
        peak.write_text("8192")
        assert groups.device("1-2-3-0", "pi3-0").usage().peak_bytes == 192
        (held,) = groups.peaks.values()
        empty(tmp_path)
        groups.remove("1-2-3-0")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(held)

    @pytest.mark.parametrize("kernel", ["before 5.19", "before 6.12"])
    def test_a_peak_that_cannot_be_forgotten_is_said(self, group: Group2, kernel: str) -> None:
        (group.folder / "memory.peak").unlink()
        if kernel == "before 6.12":  # it opens, and refuses what is written
            (group.folder / "memory.peak").symlink_to("/dev/full")
        assert not group.reset_peak()
        assert not group.peaks

    def test_a_lab_is_made_found_and_removed(self, tmp_path: Path) -> None:
        groups = tree(tmp_path)
        groups.make("1-2-3-0", ("pi3-0", "pi3-1"))
        assert groups.labs() == {"1-2-3-0"}
        device = groups.device("1-2-3-0", "pi3-1")
        assert device.joining == (tmp_path / "terrazzo-1-2-3-0" / "pi3-1" / "cgroup.procs",)
        empty(tmp_path)
        groups.remove("1-2-3-0")
        groups.remove("1-2-3-0")
        assert groups.labs() == set()

    def test_controllers_that_are_not_handed_down(self, tmp_path: Path) -> None:
        fill(tmp_path)
        (tmp_path / "cgroup.subtree_control").write_text("")
        groups = Groups2(tmp_path, frozenset({"cpu", "memory"}), make)
        with pytest.raises(LabError, match="cpu and memory cannot be limited"):
            groups.make("1-2-3-0", ("pi3-0",))


class TestWrites:
    def test_what_was_not_taken_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "limit"
        path.write_text("1234567")
        with pytest.raises(LabError, match="holds '9234567' after '9' was written"):
            kernelfile.set_to(path, "9")

    def test_what_was_refused_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(LabError, match=r"refused '5' for .*missing"):
            kernelfile.write(tmp_path / "missing", "5")


class TestOwners:
    def test_this_process_is_alive_and_its_labs_differ(self) -> None:
        first, second = state.new_name(), state.new_name()
        assert first != second
        assert state.is_alive(first)

    def test_a_later_process_with_the_same_number_is_another(self) -> None:
        space, process, began, count = state.new_name().split("-")
        assert not state.is_alive(f"{space}-{process}-{int(began) - 1}-{count}")

    @pytest.mark.parametrize("name", ["shop", "1-2-3", "a-b-c-d", "12-1-1-0"])
    def test_strangers_are_left_alone(self, name: str) -> None:
        assert state.is_alive(name)

    def test_only_dead_labs_are_removed(self, tmp_path: Path) -> None:
        alive = state.new_name()
        space, process, began, _ = alive.split("-")
        dead = f"{space}-{process}-{int(began) - 1}-0"
        for name in (alive, dead, "shop"):
            (tmp_path / f"terrazzo-{name}").mkdir()
            (tmp_path / f"lab-{name}.json").write_text("{}")
        (tmp_path / "other").mkdir()
        groups = Groups2(tmp_path, frozenset({"cpu", "memory"}))
        assert remove_dead(groups, tmp_path) == [dead]
        assert remove_dead(groups, tmp_path) == []
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {
            f"terrazzo-{alive}", f"lab-{alive}.json", "terrazzo-shop", "lab-shop.json", "other",
        }  # fmt: skip

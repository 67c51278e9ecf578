"""Cells on this machine's own control groups, whichever version it has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from terrazzo.lab.cell import inside, slow_storage
from terrazzo.lab.groups import find_groups
from terrazzo.lab.hosts import disk_of

READ_BYTES, READ_BYTES_PER_S = 4 << 20, 8 << 20


def test_a_process_in_a_cell_reads_as_slowly_as_asked_for(tmp_path: Path) -> None:
    if disk_of(tmp_path) is None or not find_groups().can_limit_storage:
        pytest.skip("slow storage was NOT tested: no disk, or no blkio or io controller")
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(READ_BYTES))
    os.sync()

    def read() -> tuple[str, float]:
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while os.read(number, 1 << 20):
            pass
        return Path("/proc/self/cgroup").read_text(), time.perf_counter() - begin

    with slow_storage(tmp_path, read_bytes_per_s=READ_BYTES_PER_S, reads_per_s=1000) as group:
        groups, took_s = inside(group, read)
    assert "/cell" in groups
    assert took_s > 0.5 * READ_BYTES / READ_BYTES_PER_S, "a busy machine can only be slower"
    assert not any(path.exists() for path in group.joining), "it is gone, and so are its limits"

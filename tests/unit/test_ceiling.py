"""What a process may take: the machine's memory, or the tightest of the groups it is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from terrazzo.runtime.ceiling import ceiling_bytes

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a/b", {"a/memory.max": "3000", "a/b/memory.max": "2000"}, 2000),
        (
            "5:cpu,cpuacct:/x\n3:memory:/a",
            {"memory/a/memory.limit_in_bytes": "700", "cpu/x/memory.limit_in_bytes": "5"},
            700,
        ),
        ("3:memory:/gone", {"memory/memory.limit_in_bytes": "9223372036854771712"}, TOTAL),
        ("", {}, TOTAL),
    ],
    ids=["a parent's", "its own", "version 1", "none", "no groups"],
)
def test_the_least_limit_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text(groups)
    assert ceiling_bytes(made(tmp_path / "fs", files), membership) == expected


def test_without_proc(tmp_path: Path) -> None:
    assert ceiling_bytes(tmp_path, tmp_path / "missing") == TOTAL

"""A cell: a control group of its own for processes of this machine, without a lab around it.

    with slow_storage(folder, read_bytes_per_s=20 << 20, reads_per_s=600) as group:
        found = inside(group, work)

It is named as labs are, so that one whose maker is dead is found by ``terrazzo lab clean``, and as
they do it goes before everybody else on this machine.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from terrazzo.errors import LabError
from terrazzo.lab import kernelfile, state
from terrazzo.lab.clean import remove_lab
from terrazzo.lab.groups import Group, Groups, find_groups
from terrazzo.lab.hosts import disk_of

NAME = "cell"
Found = TypeVar("Found")


@contextmanager
def cell(groups: Groups | None = None, *, folder: Path = state.FOLDER) -> Iterator[Group]:
    """While the block runs; processes that are still in it then are ended."""
    groups = find_groups() if groups is None else groups
    name = state.new_name()
    try:
        groups.make(name, (NAME,))
        yield groups.device(name, NAME)
    finally:
        remove_lab(name, groups, folder)


@contextmanager
def slow_storage(
    path: Path, *, read_bytes_per_s: int, reads_per_s: int, groups: Groups | None = None
) -> Iterator[Group]:
    """A cell whose processes find the disk under ``path`` as slow as that."""
    groups = find_groups() if groups is None else groups
    disk = disk_of(path)
    if disk is None or not groups.can_limit_storage:
        why = f"{path} is on no disk of this machine's own"
        if disk is not None:
            why = "this kernel offers no blkio or io controller"
        raise LabError(f"storage cannot be slowed: {why}")
    with cell(groups) as group:
        group.limit_storage(disk, read_bytes_per_s=read_bytes_per_s, reads_per_s=reads_per_s)
        yield group


def join(group: Group, process: int) -> None:
    """What it starts from now on is in the group, too."""
    for path in group.joining:
        kernelfile.write(path, str(process))


def inside(group: Group, work: Callable[[], Found]) -> Found:
    """What ``work`` gives, done by a child of this process that lives in the group."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def enter(told: Connection) -> None:
        join(group, os.getpid())
        told.send(work())

    child = multiprocessing.get_context("fork").Process(target=enter, args=(theirs,))
    child.start()
    theirs.close()
    try:
        found: Found = ours.recv()
    except EOFError as error:
        raise LabError("the process in the cell ended before its work was done") from error
    finally:
        child.join()
        ours.close()
    return found

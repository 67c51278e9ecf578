"""Faults: each does what its name says, at its time, from Python and by command."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

from terrazzo.errors import UsageError
from terrazzo.lab import LabHosts, Topology
from terrazzo.lab.faults import Fault, carry_out, restore, step_of, wait_for
from terrazzo.lab.probes import Probes
from terrazzo.lab.verify import flows
from terrazzo.records.event import Event

pytestmark = pytest.mark.timeout(120)

COUNTING = """
import itertools, pathlib, sys, time
for i in itertools.count():
    pathlib.Path(sys.argv[1]).write_text(str(i)); time.sleep(0.01)
"""


until = partial(wait_until, limit_s=15.0)


@contextmanager
def counting(hosts: LabHosts, device: int, path: Path) -> Iterator[Callable[[], int]]:
    """A process in the device that counts into a file."""
    command = [sys.executable, "-S", "-c", COUNTING, str(path)]
    process = hosts.run(command, device=device, environment={})
    try:
        assert until(path.exists)
        yield lambda: int(path.read_text() or -1)
    finally:
        restore(hosts, device)
        process.close()


def can_reach(hosts: LabHosts, device: int) -> bool:
    """Whether its neighbour gets an answer from a device's own address within two seconds."""
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), timeout=2)\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError: sys.exit(3)"
    )
    other = (device + 1) % 3
    command = [sys.executable, "-S", "-c", code, hosts.address(device)]
    process = hosts.run(command, device=other, environment={})
    assert until(lambda: process.poll() is not None)
    process.close()
    return process.status == 0


def test_a_cut_link_is_dead_until_it_is_restored(hosts: LabHosts) -> None:
    assert can_reach(hosts, 1)
    carry_out(Fault("cut", 1), hosts)
    try:
        assert not can_reach(hosts, 1)
        assert can_reach(hosts, 2)  # asks from device 0: the others are not concerned
    finally:
        carry_out(Fault("restore", 1), hosts)
    assert until(lambda: can_reach(hosts, 1))


def test_a_slow_link(hosts: LabHosts) -> None:
    with Probes.start(hosts, compute=False) as probes:
        carry_out(Fault("slow", 0, value=5e6), hosts)
        try:
            (flow,) = flows([(probes.inside[0], probes.inside[1], hosts.address(1))], 0.7)
        finally:
            restore(hosts, 0)
    assert 0 < flow.bits_per_s < 1.15 * 5e6


def test_a_paused_device_stands_still_and_goes_on(hosts: LabHosts, tmp_path: Path) -> None:
    with counting(hosts, 1, tmp_path / "count") as count:
        carry_out(Fault("pause", 1), hosts)
        seen: list[int] = []

        def stands() -> bool:
            """The kernel may take a moment to stop it."""
            seen.append(count())
            time.sleep(0.3)
            return count() == seen[-1]

        assert until(stands)
        stopped = seen[-1]
        carry_out(Fault("resume", 1), hosts)
        assert until(lambda: count() > stopped)


def test_a_killed_device_has_no_process_left(hosts: LabHosts, tmp_path: Path) -> None:
    with counting(hosts, 2, tmp_path / "count"):
        carry_out(Fault("pause", 2), hosts)  # standing still must not save it
        carry_out(Fault("kill", 2), hosts)
        assert until(lambda: not hosts.group(2).processes())


def test_full_memory_ends_who_asks_for_more(hosts: LabHosts, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "held = b'x' * (40 << 20)"
    )
    full = tmp_path / "full"
    command = [sys.executable, "-S", "-c", code, str(full)]
    process = hosts.run(command, device=0, environment={})
    carry_out(Fault("fill", 0, value=float(16 << 20)), hosts)
    assert hosts.usage(0).memory_bytes > 70 << 20
    full.touch()
    assert until(lambda: process.poll() is not None)
    process.close()
    assert process.status == -9
    restore(hosts, 0)
    assert until(lambda: not hosts.group(0).processes())


def test_by_command_at_a_step(hosts: LabHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    hosts.note_run(run)
    assert Topology.from_json((run / "lab.json").read_text()) == hosts.topology
    with counting(hosts, 1, tmp_path / "count"):
        words = ["lab", "fault", "kill", "small-1", "--at-step", "2", "--lab", hosts.name]
        command = subprocess.Popen(
            [sys.executable, "-m", "terrazzo.cli", *words], stdout=subprocess.PIPE, text=True
        )
        events = run / "events-0.jsonl"
        events.write_text(Event(0, 1, "forward", "compute", "conv", 0.0, 1.0).to_line() + "\n")
        assert step_of(run) == 1
        time.sleep(0.5)
        assert hosts.group(1).processes()
        events.write_text(Event(0, 2, "forward", "compute", "conv", 0.0, 1.0).to_line() + "\n")
        said, _ = command.communicate(timeout=60)
        assert (command.returncode, said) == (0, "kill small-1: done\n")
        assert until(lambda: not hosts.group(1).processes())


def test_waiting_ends_with_what_it_waits_for(tmp_path: Path) -> None:
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    late = Fault("cut", 0, after_s=60.0)
    assert not wait_for(late, run_folder=None, goes_on=lambda: not over.is_set())
    assert wait_for(Fault("cut", 0, after_s=0.1), run_folder=None)
    with pytest.raises(UsageError, match="records no run"):
        wait_for(Fault("cut", 0, at_step=3), run_folder=None)

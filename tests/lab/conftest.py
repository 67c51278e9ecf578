"""Emulated devices for tests; without root they are skipped, and it is said that they were."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import pytest

from terrazzo.errors import LabError
from terrazzo.lab import LabHosts

sys.path.insert(0, str(Path(__file__).parent))

from emulated import described
from sshd import SshDevices, ssh_devices


def missing() -> str:
    """What this machine lacks for a lab."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "no root"
    try:
        with (
            TemporaryDirectory() as folder,
            LabHosts.open(described("1xsmall", Path(folder))),
        ):
            return ""
    except LabError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = missing() if here else ""
    for item in here:
        item.add_marker(pytest.mark.lab)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"the lab was NOT tested: {reason}"))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of a test's time limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One after the other, whoever runs them: labs share this machine's cores, and the next one
    that starts clears away what a test has left lying on purpose.

    pytest asks this for all tests, and those without a lab wait for nobody.
    """
    if Path(__file__).parent not in item.path.parents:
        return (yield)
    with (Path(gettempdir()) / "terrazzo-lab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabHosts]:
    topology = described("3xsmall", tmp_path_factory.mktemp("presets"))
    with LabHosts.open(topology) as found:
        found.throttle([0.14] * 3)  # each worker may hold such a lab, and more must still fit
        yield found


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevices]:
    """Two of them with an SSH server each."""
    folder = tmp_path_factory.mktemp("ssh")
    with (
        LabHosts.open(described("2xroomy", folder)) as hosts,
        ssh_devices(hosts, folder) as found,
    ):
        yield found

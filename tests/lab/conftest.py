"""Emulated devices for tests; without root they are skipped, and it is said that they were."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from terrazzo.errors import LabError
from terrazzo.lab import LabHosts

sys.path.insert(0, str(Path(__file__).parent))

from emulated import described  # noqa: E402: beside this file


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


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabHosts]:
    topology = described("3xsmall", tmp_path_factory.mktemp("presets"))
    with LabHosts.open(topology) as found:
        found.throttle([0.2] * 3)
        yield found

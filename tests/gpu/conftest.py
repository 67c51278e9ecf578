"""Devices with a GPU for tests; without one they are skipped, and it is said that they were."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "dist"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            reason = "GPUs were NOT tested: torch finds none here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _devices() -> Iterator[None]:
    """Processes that load torch themselves: a GPU that was seen before a fork is lost after it.

    Nets in them do not measure themselves, which a CPU beside a GPU would, unless a test says so.
    """
    import devices

    before, devices.START = devices.START, "spawn"
    with mock.patch.dict(os.environ, {"TERRAZZO_MEASURE": "off"}):
        yield
        devices.close_all()
    devices.START = before

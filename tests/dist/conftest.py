"""Ends the device processes when the tests are done."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _devices() -> Iterator[None]:
    yield
    from devices import close_all

    close_all()

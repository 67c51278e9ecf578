"""Random models by random plans, and those that were wrong once (``tools/fuzz_exactness.py``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from devices import run_on

TOOLS = Path(__file__).parents[2] / "tools"
ONCE_WRONG = (5075,)
"""Statistics of a value that is whole, read by strips: an assertion failed."""


def explored(seeds: tuple[int, ...]) -> list[str]:
    """Why each of them was refused; nothing if it has plain PyTorch's numbers."""
    sys.path.insert(0, str(TOOLS))
    from fuzz_exactness import case

    return [case(seed) for seed in seeds]


@pytest.mark.parametrize(("devices", "seeds"), [(3, (*ONCE_WRONG, *range(8))), (2, (100, 109))])
def test_random_models_by_random_plans(devices: int, seeds: tuple[int, ...]) -> None:
    for refused in run_on(devices, explored, seeds):
        assert refused == [""] * len(seeds)

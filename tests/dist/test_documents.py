"""The Python of the documents on two devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script import together

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_docs import RUNNABLE, python_of

# What must hold after the last block.
CLOSINGS = {
    "README.md": "assert not model[0].weight.equal(before), 'nothing was trained'",
    "docs/your-script.md": "assert 'spread over devices' in refusal, 'pixels were not refused'",
}


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_python_runs_on_two_devices(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    parts = [*(block.text for block in python_of(name)), CLOSINGS[name]]
    script.write_text("\n".join(parts), encoding="utf-8")
    together(script, [], folder=tmp_path, devices=2)

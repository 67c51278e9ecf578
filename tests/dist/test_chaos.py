"""A few rounds of chaos, the same ones every time; ``make chaos`` has many and new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "chaos.py"
SEED = 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [5, 6], ids=["two-of-five", "the-reader"])
def test_a_round_of_chaos(number: int) -> None:
    command = [sys.executable, str(TOOL), "--seed", str(SEED), "--only", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults, 0 rounds failed" in done.stdout


def test_wrong_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is no friend of the accused."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import torch
    from chaos import Strike, judged
    from safetensors.torch import save_file

    right = {"weight": torch.ones(3, dtype=torch.float64)}
    strikes = [Strike("kill", 1, "forward", 2)]
    assert "[0]" in judged(tmp_path, 2, strikes, right)
    save_file({"weight": right["weight"] + 1e-7}, tmp_path / "0.safetensors")
    assert "weight is off" in judged(tmp_path, 2, strikes, right)
    save_file(right, tmp_path / "0.safetensors")
    assert judged(tmp_path, 2, strikes, right) == ""

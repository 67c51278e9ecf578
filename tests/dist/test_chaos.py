"""A few rounds of chaos, the same ones every time; ``make chaos`` has many and new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "chaos.py"
SEED, FAULTS = 11, 5


@pytest.mark.timeout(240)
def test_some_rounds_of_chaos() -> None:
    command = [sys.executable, str(TOOL), "--seed", str(SEED), "--faults", str(FAULTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 rounds failed" in done.stdout
    assert "channels" in done.stdout


def test_wrong_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is no friend of the accused."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import torch
    from chaos import Strike, judged
    from safetensors.torch import save_file

    from terrazzo.runtime.checkpoint import Shelf

    right = {"weight": torch.ones(3, dtype=torch.float64)}
    off = {"weight": right["weight"] + 1e-7}
    strikes = [Strike("kill", 1, "forward", 2)]
    assert "[0]" in judged(tmp_path, 2, strikes, {3: right})
    assert "[0, 1]" in judged(tmp_path, 2, [Strike("clock", 1, "forward", 2)], {3: right})
    save_file(off, tmp_path / "0.safetensors")
    assert "weight is off" in judged(tmp_path, 2, strikes, {3: right})
    save_file(right, tmp_path / "0.safetensors")
    assert judged(tmp_path, 2, strikes, {3: right}) == ""
    shelf = Shelf(tmp_path / "checkpoints" / "1")
    shelf.save(2, right, {})
    assert judged(tmp_path, 2, strikes, {2: right, 3: right}) == ""
    assert "checkpoint 2 of device 1" in judged(tmp_path, 2, strikes, {2: off, 3: right})
    (shelf.folder / "step-00000002" / "model.safetensors").write_bytes(b"x")
    assert "damaged" in judged(tmp_path, 2, strikes, {2: right, 3: right})

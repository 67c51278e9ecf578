"""A few rounds of chaos, the same ones every time; ``make chaos`` has many and new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
SEED, FAULTS = 93, 5


@pytest.mark.timeout(240)
def test_some_rounds_of_chaos() -> None:
    command = [
        sys.executable,
        str(TOOLS / "chaos.py"),
        "--seed",
        str(SEED),
        "--faults",
        str(FAULTS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 rounds failed" in done.stdout
    assert "channels" in done.stdout


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What it says of a folder in which device 1 of two was struck."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from chaos_case import Case, Recipe
    from chaos_faults import Strike, note
    from chaos_judge import judged

    note(tmp_path, 1, 0.0)

    def say(kind: str = "kill") -> str:
        case = Case(2, Recipe(), (Strike(kind, 1, "forward", 2),))
        return judged(tmp_path, case.to_json(), tmp_path / "right")

    return say


def rest(**other: Any) -> dict[str, Any]:
    """What a checkpoint holds beside the weights, much shortened."""
    import torch

    moments = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.05}]}
    return {"parts": {"0 SGD": moments}, "data": {"position": 1, "reader": 0}, **other}


def test_wrong_numbers_are_noticed(tmp_path: Path, judge: Any) -> None:
    """The judge is no friend of the accused."""
    import torch
    from chaos_case import STEPS
    from safetensors.torch import save_file

    from terrazzo.runtime.checkpoint import Shelf

    right = {"weight": torch.ones(3, dtype=torch.float64)}
    off = {"weight": right["weight"] + 1e-7}
    for step in (2, STEPS):
        Shelf(tmp_path / "right").save(step, right, rest())
    assert "[0]" in judge()
    assert "[0, 1]" in judge("clock")
    save_file(off, tmp_path / "0.safetensors")
    assert "weight is off" in judge()
    save_file(right, tmp_path / "0.safetensors")
    assert judge() == ""
    (tmp_path / "1.joined").touch()
    assert "[1]" in judge()
    (tmp_path / "1.joined").unlink()
    shelf = Shelf(tmp_path / "checkpoints" / "1")
    shelf.save(2, right, rest(data={"position": 1, "reader": 1}))
    assert judge() == ""
    shelf.save(2, off, rest())
    assert "checkpoint 2 of device 1: model weight is off" in judge()
    (shelf.folder / "step-00000002" / "model.safetensors").write_bytes(b"x")
    assert "damaged" in judge()


@pytest.mark.parametrize("part", ["position", "moments", "rate", "kind"])
def test_a_mixed_checkpoint_is_noticed(part: str, tmp_path: Path, judge: Any) -> None:
    import torch
    from chaos_case import STEPS
    from safetensors.torch import save_file

    from terrazzo.runtime.checkpoint import Shelf

    right = {"weight": torch.ones(3, dtype=torch.float64)}
    save_file(right, tmp_path / "0.safetensors")
    for step in (2, STEPS):
        Shelf(tmp_path / "right").save(step, right, rest())
    other = rest()
    optimizer = other["parts"]["0 SGD"]
    if part == "position":
        other["data"]["position"] = 2
    elif part == "moments":
        optimizer["state"][0]["momentum_buffer"] += 1e-7
    elif part == "rate":
        optimizer["param_groups"][0]["lr"] = 0.005
    else:
        optimizer["param_groups"][0]["lr"] = None
    Shelf(tmp_path / "checkpoints" / "0").save(2, right, other)
    assert "checkpoint 2 of device 0: rest" in judge()


def test_a_loss_is_told_by_the_first_step_of_a_new_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were on their way to their end, and others that are made again."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from chaos_case import Case, Recipe
    from chaos_faults import Strike
    from chaos_numbers import loss_of
    from chaos_round import Outcome

    case = Case(3, Recipe(layout="channels"), (Strike("pause", 1, "forward", 2, 12.0),))
    rows = [(1, 0, 10.0), (2, 0, 10.5), (3, 0, 11.0), (3, 1, 16.0), (4, 1, 16.5)]
    lines = ["0 | terrazzo: device 1 was silent for 4.5 s: 2 devices go on"]
    found = Outcome(struck_s={1: 10.8}, steps={0: rows, 1: rows[:2], 2: rows}, lines=lines)
    loss = loss_of(case, found)
    assert loss is not None
    assert (loss.again, loss.step_s, loss.silent_s) == (1, 0.5, 4.5)
    assert loss.took_s == pytest.approx(5.2)
    found.steps = {0: rows[:3], 1: rows[:3], 2: rows[:3]}
    assert loss_of(case, found) is None  # nobody was lost

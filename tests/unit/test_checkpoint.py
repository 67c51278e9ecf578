"""Checkpoints: whole or not there, read back bit by bit, damage noticed and passed over."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from terrazzo.errors import RunError, UsageError
from terrazzo.runtime.checkpoint import MODEL, STATE, Shelf, latest_among


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    model[2].weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(2, 3, 9, 9)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def rest_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"parts": {"0 Adam": optimizer.state_dict()}, "epoch": 3, "data": (1, "x", None)}


def test_all_comes_back_and_the_model_without_us(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = Shelf(tmp_path / "shelf").save(7, model.state_dict(), rest_of(optimizer))
    found = Shelf(tmp_path / "shelf").load()
    assert found.step == 7 and not found.passed_over
    assert found.rest["epoch"] == 3 and found.rest["data"] == (1, "x", None)
    other, plain = trained()[0], trained()[0]
    fresh = torch.optim.Adam(other.parameters(), lr=1.0)
    other.load_state_dict(found.model)
    fresh.load_state_dict(found.rest["parts"]["0 Adam"])
    plain.load_state_dict(load_file(path / MODEL))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
        assert torch.equal(plain.state_dict()[name], tensor)
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert fresh.param_groups[0]["lr"] == 1e-2


def test_tied_weights_and_half_precision(tmp_path: Path) -> None:
    shared = torch.randn(3, 4).bfloat16()
    Shelf(tmp_path).save(1, {"a": shared, "b": shared, "c": shared.t()}, {})
    found = Shelf(tmp_path).load().model
    assert torch.equal(found["a"], shared) and torch.equal(found["b"], shared)
    assert torch.equal(found["c"], shared.t())


def test_two_stay(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (1, 2, 30, 4):
        shelf.save(step, {"a": torch.full((2,), float(step))}, {"step": step})
    assert shelf.steps == [2, 4, 30], "the one just written stays, and those of another training"
    assert shelf.load().rest == {"step": 30} and shelf.load(4).rest == {"step": 4}


def test_checkpoints_of_another_training_are_put_aside(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (900, 1000):
        shelf.save(step, {"a": torch.ones(2)}, {})
    assert shelf.put_aside(above=900) == ([1000], tmp_path / "before-1")
    assert shelf.put_aside(above=0) == ([900], tmp_path / "before-2")
    assert shelf.put_aside(above=0)[0] == shelf.steps == []
    assert Shelf(tmp_path / "before-1").load().step == 1000


def test_one_that_was_about_to_be_replaced_is_found(tmp_path: Path) -> None:
    """The power goes between two renames: the step was there before, and is still."""
    shelf = Shelf(tmp_path)
    shelf.save(5, {"a": torch.ones(2)}, {}).rename(tmp_path / ".replaced-step-00000005")
    found = shelf.latest()
    assert found is not None and found.step == 5
    shelf.save(5, {"a": torch.zeros(2)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert shelf.load().model["a"].tolist() == [0, 0]


def test_the_latest_of_all_devices_is_taken(tmp_path: Path) -> None:
    """Those with the first numbers were lost early; and the last one's latest is damaged."""
    for device, steps in {"0": (100,), "1": (300,), "2": (400, 500), "1001": (450, 600)}.items():
        for step in steps:
            path = Shelf(tmp_path / device).save(step, {"a": torch.ones(2)}, {"step": step})
    (path / MODEL).write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="step 600"):
        found = latest_among(tmp_path)
    assert found is not None and found.rest == {"step": 500}
    assert latest_among(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", [MODEL, "parts.safetensors", STATE])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, how: str) -> None:
    shelf = Shelf(tmp_path)
    for step in (1, 2):
        path = shelf.save(step, {"a": torch.full((50,), float(step))}, {"t": torch.ones(9)})
    data = bytearray((path / name).read_bytes())
    if how == "gone":
        (path / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data[: len(data) // 2] if how == "cut" else data)
    found = shelf.load()
    assert found.step == 1 and found.model["a"][0] == 1.0
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("step 2: ")
    with pytest.warns(RuntimeWarning, match=r"was passed over: step 2: "):
        shelf.latest()
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read \(step 2: "):
        shelf.load(2)


def test_killed_while_writing(tmp_path: Path) -> None:
    """Whatever was under way is not taken for a checkpoint, and is cleared away."""
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from pathlib import Path
        from terrazzo.runtime import checkpoint
        shelf = checkpoint.Shelf(Path({str(tmp_path)!r}))
        shelf.save(1, {{"a": torch.ones(3)}}, {{}})
        checkpoint._flush = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        shelf.save(2, {{"a": torch.zeros(3)}}, {{}})
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    shelf = Shelf(tmp_path)
    assert shelf.steps == [1] and len(list(tmp_path.iterdir())) == 2
    assert shelf.load().model["a"].tolist() == [1, 1, 1]
    shelf.save(3, {"a": torch.zeros(3)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import resource, torch
        from pathlib import Path
        from terrazzo.runtime.checkpoint import Shelf
        shelf = Shelf(Path({str(tmp_path)!r}))
        shelf.save(1, {{"a": torch.ones(3)}}, {{}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            shelf.save(2, {{"a": torch.zeros(1 << 18)}}, {{}})
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(
        "RunError the checkpoint of step 2 (1.0 MiB) could not be written"
    )
    assert "too large" in done.stdout and "MiB free" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert Shelf(tmp_path).load().model["a"].tolist() == [1, 1, 1]


def test_nothing_there_and_nothing_that_can_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        Shelf(tmp_path).load()
    with pytest.raises(UsageError, match="keep at least one"):
        Shelf(tmp_path, kept=0)
    with pytest.raises(UsageError, match="holds a function"):
        Shelf(tmp_path).save(1, {}, {"hook": lambda: None})
    assert not list(tmp_path.iterdir())

"""A few rounds of chaos, the same ones every time; ``make chaos`` has many and new ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
SEED, FAULTS = 93, 5


@pytest.mark.timeout(420)
def test_some_rounds_of_chaos(tmp_path: Path) -> None:
    saved, options = tmp_path / "all.json", f"--seed {SEED} --faults {FAULTS} --save"
    command = [sys.executable, str(TOOLS / "chaos.py"), *options.split(), str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(saved.read_text(encoding="utf-8"))
    assert (told["faults"], told["failed"]) == (FAULTS, [])
    assert sum(told["kinds"].values()) == sum(told["places"].values()) == FAULTS
    assert 0 < told["on_cut_weights"] < FAULTS
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == []


@pytest.mark.parametrize("faults", [1, 2, 13])
def test_exactly_as_many_faults_as_asked_for(faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rounds are on their way, and where some strikes do not come to pass."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from chaos import cases, parsed, played
    from chaos_round import Outcome

    class Crew:
        """Rounds end in the order in which they were begun, and every third strikes nobody."""

        def __init__(self) -> None:
            self.begun: list[tuple[int, Any]] = []

        @property
        def has_room(self) -> bool:
            return len(self.begun) < 3

        def play(self, number: int, case: Any) -> None:
            self.begun.append((number, case))

        def next(self, limit_s: float | None) -> tuple[int, Outcome]:
            number, case = self.begun.pop(0)
            struck = case.strikes if number % 3 else []
            return number, Outcome(struck_s={strike.device: 0.0 for strike in struck})

    options = parsed(["--seed", "1", "--faults", str(faults)])
    rounds = list(played(cases(options), Crew(), wanted=faults))
    assert sum(len(found.struck_s) for _, _, found in rounds) == faults


def test_long_rounds_come_first_where_they_share_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from chaos import cases, parsed

    alone = list(cases(parsed("--seed 1 --faults 40".split())))
    shared = list(cases(parsed("--seed 1 --faults 40 --at-once 4".split())))
    assert [number for number, _ in alone] == list(range(90))
    assert sorted(shared, key=lambda one: one[0]) == alone  # the same rounds
    needed = [case for _, case in shared if case in [c for _, c in alone[:20]]]
    assert any(strike.kind == "hang" for strike in shared[0][1].strikes)
    lengths = [case.expected_s for case in needed]
    assert lengths == sorted(lengths, reverse=True)


def test_a_limit_ends_what_still_runs_and_sums_up_the_rest(tmp_path: Path) -> None:
    """Rounds that have not ended by then are nobody's fault, and are not counted."""
    saved = tmp_path / "all.json"
    options = f"--seed {SEED} --faults 50 --within 25 --save {saved}"
    command = [sys.executable, str(TOOLS / "chaos.py"), *options.split()]
    begin_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert time.monotonic() - begin_s < 140, "fifty faults take many minutes"
    told = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, told["failed"]) == (1, []), done.stdout + done.stderr
    assert told["faults"] < 50


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

"""Phases of a training: told from its spans, and each in its own mode on a board of files."""

from __future__ import annotations

from pathlib import Path

from terrazzo.boards import Rig, load_board
from terrazzo.boards.kernel import CPU
from terrazzo.cli.main import main
from terrazzo.records import Group, Layout, Plan
from terrazzo.records.event import read_events
from terrazzo.records.modes import Mode
from terrazzo.records.seat import COMPUTE, EVALUATION, INPUT, WAITING, Seat
from terrazzo.runtime.phase import READING, PhaseWatch
from terrazzo.seating import KNOBS

CALM = Mode.of({"cores": 2, "cpu_hz": 1.5e9})


class Loop:
    """A training's spans, by a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s, self.seen, self.went_on = 0.0, [], 0
        self.watch = PhaseWatch(self.seen.append, self.go_on, clock=lambda: self.now_s)

    def go_on(self) -> None:
        self.went_on += 1

    def step(self, *, fed_s: float = 0.0, away_s: float = 0.0, read_s: float = 0.0) -> None:
        self.now_s += fed_s
        self.watch.fed(fed_s)
        self.watch.span("agree", READING, read_s, 0.0)
        self.watch.call(True)
        self.watch.span("compute", "conv", 0.1, 0.0)
        self.watch.span("exchange", "halo", away_s + 0.01, away_s)
        self.now_s += 0.1 + away_s + read_s
        self.watch.step()


class TestWatch:
    def test_an_input_bound_epoch_and_one_that_computes(self):
        loop = Loop()
        for _ in range(8):
            loop.step(fed_s=0.3)
        for _ in range(20):
            loop.step()
        assert loop.seen == [INPUT, COMPUTE]

    def test_a_device_that_does_not_read_waits_for_who_does(self):
        loop = Loop()
        for _ in range(8):
            loop.step(read_s=0.3)
        assert loop.seen == [INPUT]

    def test_a_device_that_is_faster_than_the_others(self):
        loop = Loop()
        for _ in range(8):
            loop.step(away_s=0.3)
        assert loop.seen == [WAITING]

    def test_one_slow_step_is_no_phase(self):
        loop = Loop()
        for number in range(30):
            loop.step(fed_s=0.3 if number == 11 else 0.0)
        assert loop.seen == [] and loop.went_on == 30

    def test_evaluation_begins_with_its_first_call_and_ends_with_the_next_step(self):
        loop = Loop()
        for _ in range(8):
            loop.step(fed_s=0.3)
        for _ in range(3):
            loop.now_s += 5.0
            loop.watch.call(False)
        loop.step(fed_s=0.3)
        assert loop.seen == [INPUT, EVALUATION, INPUT]


SCRIPT = """
import os
from pathlib import Path
import torch
import terrazzo as tz

tz.init()
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
x = torch.randn(2, 1, 8, 8)
net = tz.parallelize(model, (x,), groups="one")
clock = Path(os.environ["TERRAZZO_KNOBS"], "sys/devices/system/cpu/cpufreq/policy0")

net.eval()
net(x)
print("evaluation", (clock / "scaling_max_freq").read_text().strip(), flush=True)
net.train()
net(x).square().mean().backward()
"""


def test_a_training_changes_modes_with_its_phases(tmp_path, monkeypatch, capfd):
    rig = Rig(load_board("pi-like"), tmp_path / "board")
    paths = [path for path in (rig.root / CPU).rglob("*") if path.is_file()]
    before = {path: path.read_text().strip() for path in paths}
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    seat = Seat("device0", None, ((EVALUATION, CALM),))
    Plan("0123", 1, (Group("out", Layout()),), (seat,)).save("plan.json")
    monkeypatch.setenv(KNOBS, str(rig.root))
    assert main(["run", "--on", "1", "--plan", "plan.json", "--run-dir", "run", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert "evaluation 1500000" in out
    assert "of --plan only the power modes hold" in err
    assert {path: path.read_text().strip() for path in paths} == before
    notes = [event for event in read_events(Path("run")) if event.kind == "note"]
    told = [note.name for note in notes if note.name.startswith(("phase:", "mode"))]
    assert told == ["phase: evaluation", f"mode: {CALM.text}", "phase: compute"]
    took = [dict(note.values)["took_s"] for note in notes if note.name.startswith("mode:")]
    assert all(seconds > 0 for seconds in took)

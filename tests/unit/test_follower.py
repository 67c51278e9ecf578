"""Modes that follow the phases of a training, on a simulated board whose load changes."""

from __future__ import annotations

from pathlib import Path

from terrazzo.boards import Rig, Workload, load_board
from terrazzo.cli.following import follow
from terrazzo.meters.estimator import Calibration
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.power.explorer import as_measured
from terrazzo.power.follower import Follower, PhaseFile, Seen
from terrazzo.power.panel import Panel
from terrazzo.power.selector import ENERGY, Goal, choose
from terrazzo.power.simulated import bench_of, rigged
from terrazzo.power.sysfs import Sysfs
from terrazzo.power.tuner import Tuning
from terrazzo.records.modes import Measured, Mode
from terrazzo.records.seat import COMPUTE, EVALUATION
from terrazzo.report.screen import Screen

TRAINING = Workload("training", flops=2e10, bytes=2e8, launches=50, input_cycles=1e7)
READING = Workload("evaluation", flops=1e7, bytes=6e9, launches=10, input_cycles=1e7)
"""Memory limits it: the clock of the cores buys nothing."""
MODES = [Mode.of({"cores": 4, "cpu_hz": hz}) for hz in (2.4e9, 1.8e9, 1.5e9)]


class Board:
    """A board that trains for a while, is evaluated for a while, and so on."""

    def __init__(self, root: Path, *, training_s: float, evaluation_s: float) -> None:
        self.rig = Rig(load_board("pi-like"), root, workload=TRAINING)
        self.phase, self.visit = COMPUTE, 0
        self.lengths = {COMPUTE: training_s, EVALUATION: evaluation_s}
        self.ends_s = self.rig.time_s + training_s

    def pause(self, seconds: float) -> None:
        self.rig.pause(seconds)
        if self.rig.time_s >= self.ends_s:
            self.phase = EVALUATION if self.phase == COMPUTE else COMPUTE
            self.visit += 1
            self.ends_s = self.rig.time_s + self.lengths[self.phase]
            self.rig.workload = TRAINING if self.phase == COMPUTE else READING

    def seen(self) -> Seen:
        return Seen(self.phase, self.visit, self.rig.steps, self.rig.time_s)

    def follower(self) -> Follower:
        rig = self.rig
        bench = bench_of(rig)
        bench.measure_s = 1.0
        rows: dict[Mode, Measured] = {}
        for mode in MODES:
            rows[mode] = bench.measure(mode, settled=False)
        bench.switch.apply(MODES[0])
        meters = find(rig.root, calibration=Calibration.guess(rig.root), clock=rig.clock).used
        found = Follower(
            Panel.find(Sysfs(rig.root, rig.pause)),
            Sampler(meters, clock=rig.clock),
            self.seen,
            Goal(ENERGY, max_slowdown=1.1),
            {COMPUTE: rows},
            MODES[0],
            measure_s=2.0,
            clock=rig.clock,
            pause=self.pause,
        )
        self.ends_s = rig.time_s + self.lengths[COMPUTE]
        return found

    def run(self, follower: Follower, until_s: float) -> dict[str, set[float]]:
        """The clocks seen in each phase in the last third."""
        begun_s, found = self.rig.time_s, {COMPUTE: set(), EVALUATION: set()}
        while self.rig.time_s - begun_s < until_s:
            follower.look()
            if self.rig.time_s - begun_s > until_s * 2 / 3 and follower._now.phase == self.phase:
                found[self.phase].add(self.rig.kernel.mode()["cpu_hz"])
        return found


def test_a_phase_is_measured_and_then_has_its_mode(tmp_path):
    board = Board(tmp_path, training_s=5.0, evaluation_s=10.0)
    follower = board.follower()
    found = board.run(follower, 45.0)
    schedule = follower.schedule
    assert schedule is not None and schedule.changes == 2 and schedule.saved > 0.01
    modes = dict(schedule.modes)
    assert modes[COMPUTE].mode == MODES[0]
    assert modes[EVALUATION].mode["cpu_hz"] < 2.4e9
    assert found == {COMPUTE: {2.4e9}, EVALUATION: {modes[EVALUATION].mode["cpu_hz"]}}
    assert 0 < follower.change.seconds < 1 and follower.change.joules > 0


def test_visits_that_end_too_soon_say_nothing_and_change_nothing(tmp_path):
    board = Board(tmp_path, training_s=2.0, evaluation_s=0.5)
    follower = board.follower()
    board.run(follower, 8.0)
    assert follower.rows[EVALUATION] == {} and follower.schedule is None
    assert board.rig.kernel.mode()["cpu_hz"] == 2.4e9


def test_a_knob_that_refuses_is_left_alone(tmp_path):
    board = Board(tmp_path, training_s=1.0, evaluation_s=6.0)
    follower = board.follower()
    board.rig.kernel.stubborn.add("scaling_max_freq")
    board.run(follower, 8.0)
    assert set(follower.rows[EVALUATION]) == {MODES[0]}


def test_phases_are_read_from_a_record(tmp_path):
    path = tmp_path / "events-0.jsonl"
    seen = PhaseFile(tmp_path)
    assert seen() == Seen(COMPUTE, 0, 0.0, 0.0)
    lines = [
        '[0, 1, "backward", "note", "traffic", 1.0, 1.0, 0, {"steps": 1.0}]',
        '[0, 2, "forward", "compute", "conv", 1.5, 1.6, 0]',
        '[0, 2, "forward", "note", "phase: evaluation", 2.0, 2.0, 0]',
        '[0, 3, "forward", "note", "phase: evaluation", 3.0, 3.0, 0]',
        '[0, 4, "forward", "note", "phase: comp',
    ]
    path.write_text("\n".join(lines))
    assert seen() == Seen(EVALUATION, 1, 3.0, 3.0)
    with path.open("a") as file:
        file.write('ute", 4.0, 4.0, 0]\n')
    assert seen() == seen() == Seen(COMPUTE, 2, 3.0, 3.0)


def test_where_following_fails_training_goes_on_as_it_was(tmp_path, capsys):
    """A record that is damaged: what it says of phases can't be read."""
    lines = '[0, 1, "forward", "note", "traffic", 1.0, 1.0, 0]\n'
    (tmp_path / "events-0.jsonl").write_text(lines)
    with rigged(load_board("pi-like"), TRAINING) as (_, bench):
        rows = [Measured(mode, 1.0 + place, 9.0 - place) for place, mode in enumerate(MODES)]
        choice = choose([as_measured(row) for row in rows], Goal(ENERGY))
        undone: list[bool] = []

        def is_running() -> bool:
            (tmp_path / "events-0.jsonl").write_text(lines + '[0, 2, "phase: ",\n')
            return True

        bench.is_running = is_running
        follow(
            bench,
            Tuning(rows, choice, []),
            Goal(ENERGY),
            folder=tmp_path,
            undo=lambda: undone.append(True),
            save=None,
            screen=Screen(),
        )
    assert undone == [True]
    assert "phases are not followed any more" in capsys.readouterr().out

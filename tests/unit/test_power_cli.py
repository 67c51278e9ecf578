"""``terrazzo power``: what it shows of file trees of simulated boards, and chooses from tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from terrazzo.boards import Rig, Workload, load_board
from terrazzo.cli.main import main, parser
from terrazzo.cli.tuning import take_own
from terrazzo.errors import PowerError, UsageError
from terrazzo.power.phases import Change, Phase, schedule
from terrazzo.power.selector import EDP, ENERGY, TIME, Goal, Option
from terrazzo.records.event import Event
from terrazzo.records.modes import Measured, Mode, ModeTable

WORK = Workload("test", flops=2e10, bytes=2e9, launches=300, input_cycles=1e8)
TABLE = """cores,cpu_mhz,time_s,power_w
1,1000,4.0,3.0
2,1000,2.1,3.6
4,1000,1.2,4.8
1,1500,2.8,3.5
2,1500,1.5,4.6
4,1500,0.85,7.0
1,2000,2.2,4.4
2,2000,1.15,6.4
4,2000,0.7,10.5
"""


pytestmark = pytest.mark.usefixtures("own_place")


def table(tmp_path: Path, text: str = TABLE) -> str:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return str(path)


class TestShow:
    def test_a_jetson(self, tmp_path, capsys):
        Rig(load_board("orin-like"), tmp_path / "board", workload=WORK)
        assert main(["power", "show", "--root", str(tmp_path / "board")]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "Energy: measured INA3221 VDD_IN: covers the board, taken to be off" in text
        assert "5%; parts of it: VDD_CPU_GPU_CV" in text
        assert "gpu_hz: GPU 115 MHz to GPU 918 MHz in 9 steps; now GPU 918 MHz, moved by" in text
        assert "preset MAXN (now): 8 cores, CPU 1.98 GHz" in text
        assert "preset REBOOT_7W: left alone" in text
        assert "degrees C: cpu-thermal 35" in text

    def test_a_pi_that_is_too_hot(self, tmp_path, capsys):
        rig = Rig(load_board("pi-like"), tmp_path / "board", workload=WORK)
        rig.share, rig.temperature_c = 0.8, 86.0
        rig.pause(0.1)
        assert main(["power", "show", "--root", str(tmp_path / "board")]) == 0
        text = capsys.readouterr().out
        assert "PMIC, 4 rails summed" in text
        assert "throttled since the start" in text

    def test_a_processor_that_counts_for_itself_alone(self, tmp_path, capsys):
        board = load_board("orin-like")
        rig = Rig(board, tmp_path / "board", workload=WORK, sensors=("rapl",))
        (rig.root / "sys/class/hwmon/hwmon1").mkdir(parents=True)
        (rig.root / "sys/class/hwmon/hwmon1/oc2_event_cnt").write_text("7\n")
        assert main(["power", "show", "--root", str(rig.root)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "measured, but of the processor alone" in text
        assert "RAPL package-0: covers the processor, taken to be off by up to 5%" in text
        assert "clocks were cut 7 times" in text

    def test_nothing_at_all(self, tmp_path, capsys):
        assert main(["power", "show", "--root", str(tmp_path)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "estimated, not measured" in text and "off by up to 50%" in text
        assert "This device shows none" in text


class TestTables:
    def test_the_best_of_a_table(self, tmp_path, capsys):
        arguments = ["power", "tune", "--from", table(tmp_path), "--html", "modes.html"]
        assert main([*arguments, "--objective", "time", "--max-power", "8W"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "Chosen for time: 4 cores, cpu_mhz 1500" in text
        assert "nothing was run" in text
        page = Path("modes.html").read_text()
        assert page.count("<circle") > 9 and "http" not in page

    def test_a_limit_nothing_keeps(self, tmp_path, capsys):
        assert main(["power", "tune", "--from", table(tmp_path), "--max-power", "2W"]) == 2
        assert "the least is 3.00 W" in capsys.readouterr().err

    def test_bad_rows_are_named_and_left_out(self, tmp_path, capsys):
        bad = "2,1250,,4\n2,1250,1.5\n2,1750,-1,4\n4,2000,9.9,10.5\n2,x,1,1\n\n"
        assert main(["power", "tune", "--from", table(tmp_path, TABLE + bad)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for words in (
            "line 11 of", "time_s is missing", "it has 3 cells, the first line has 4",
            "time_s is -1", "could not convert", "lines 10, 14 of", "contradict each other",
        ):  # fmt: skip
            assert words in text

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "has columns none"),
            ("cores,time_s\n1,2\n", "one of power_w"),
            ("cores,time_s,time_ms,power_w\n", "one of time_s"),
            ("cores,time_s,power_w\n1,2,3\n", "1 usable modes, at least 3"),
            ("a,a,time_s,power_w\n1,1,2,3\n", "has columns a, a"),
        ],
    )
    def test_files_that_are_no_tables(self, tmp_path, text, words):
        with pytest.raises(UsageError, match=words):
            ModeTable.load(Path(table(tmp_path, text)))

    def test_units_repeats_and_saving(self, tmp_path):
        text = "cores,time_ms,power_mw\n1,2000,3000\n1,2100,3000\n2,1000,4000\n4,500,9000\n"
        found = ModeTable.load(Path(table(tmp_path, text)))
        assert found.rows[0].step_s == pytest.approx(2.05)
        assert found.rows[0].power_w == pytest.approx(3.0)
        assert found.rows[0].time_doubt == pytest.approx(0.025 / 1.025)
        assert found.rows[1].time_doubt == 0.02  # nobody said how sure it is
        found.save(tmp_path / "again.csv")
        again = ModeTable.load(tmp_path / "again.csv").rows
        assert [(row.mode, row.step_s, row.power_w) for row in again] == [
            (row.mode, row.step_s, row.power_w) for row in found.rows
        ]
        assert again[0].time_doubt == pytest.approx(found.rows[0].time_doubt, rel=1e-4)

    def test_steps_of_long_phases_and_of_none_come_back(self, tmp_path: Path) -> None:
        rows = [
            Measured(Mode.of({"cpu_hz": 1e9 * count}), 1.0 / count, 4.0 * count, phase=phase)
            for phase in ("compute", "evaluation")
            for count in range(1, 6)
        ]
        table = ModeTable(("cpu_hz",), tuple(rows), steps=(("compute", 12_345_678.0),))
        table.save(tmp_path / "table.csv")
        assert ModeTable.load(tmp_path / "table.csv").steps == table.steps

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "tune what?"),
            (["--from", "t.csv", "--simulate", "pi-like"], "tune what?"),
            (["--simulate", "pi-like", "--deadline", "6h"], "needs --steps"),
            (["--simulate", "pi-like", "--modes", "2"], "at least 4"),
            (["--simulate", "toaster"], "no simulated board toaster"),
            (["missing.py"], "no script missing.py"),
            (["--from", "missing.csv"], "cannot be read"),
            (["--from", "t.csv", "--max-slowdown", "0.5"], "faster than the fastest"),
        ],
    )
    def test_usage(self, arguments, words, capsys):
        assert main(["power", "tune", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_options_may_follow_the_script():
    words = ["train.py", "--objective", "time", "--epochs", "5", "--max-power", "9W"]
    given = parser().parse_args(["power", "tune", *words, "--", "--steps", "7"])
    take_own(given)
    assert (given.objective, given.max_power, given.steps) == ("time", "9W", None)
    assert given.arguments == ["--epochs", "5", "--steps", "7"]
    given = parser().parse_args(["power", "tune", "--modes", "9", "train.py", "--batch", "2"])
    take_own(given)
    assert given.modes == 9 and given.arguments == ["--batch", "2"]


class TestPhases:
    """A phase that waits for input, and one that computes."""

    def options(self, *figures: tuple[float, float]) -> list[Option]:
        return [
            Option(Mode.of({"clock": place}), step_s, power_w, 0.001, 0.001)
            for place, (step_s, power_w) in enumerate(figures)
        ]

    def phases(self, steps: float) -> list[Phase]:
        waiting = self.options((1.0, 4.0), (1.0, 10.0))
        computing = self.options((4.0, 6.0), (1.0, 10.0))
        return [Phase("input", steps, waiting), Phase("compute", steps, computing)]

    def test_each_phase_has_its_own_mode_where_that_pays(self):
        found = schedule(self.phases(1000), Goal(ENERGY))
        assert [option.mode["clock"] for _, option in found.modes] == [0, 1]
        assert found.changes == 1
        assert found.joules == pytest.approx(1000 * 4 + 1000 * 10 + 0.5)
        assert found.saved == pytest.approx(1 - 14000.5 / 20000)

    def test_where_changing_costs_more_than_it_saves_nothing_changes(self):
        found = schedule(self.phases(1000), Goal(ENERGY), Change(seconds=60, joules=7000))
        assert found.changes == 0 and found.saved == 0.0
        assert {option.mode["clock"] for _, option in found.modes} == {1}

    def test_in_a_long_row_of_short_phases_only_what_pays_changes(self):
        row = self.phases(10) * 5
        found = schedule(row, Goal(ENERGY), Change(joules=1.0))
        assert found.changes == 9
        assert schedule(row, Goal(ENERGY), Change(joules=1000.0)).changes == 0

    def test_limits_hold_in_every_phase(self):
        with pytest.raises(PowerError, match="in phase compute"):
            schedule(
                [
                    Phase("input", 1, self.options((1, 4))),
                    Phase("compute", 1, self.options((1, 9))),
                ],
                Goal(ENERGY, max_power_w=5),
            )
        found = schedule(
            [
                Phase("input", 1, self.options((1, 4), (1, 9))),
                Phase("compute", 1, self.options((1, 9), (1, 4))),
            ],
            Goal(ENERGY, max_power_w=5),
        )
        assert [option.mode["clock"] for _, option in found.modes] == [0, 1]
        assert found.saved is None  # there is no one mode to compare with
        with pytest.raises(UsageError, match="does not add up"):
            schedule(self.phases(1), Goal(EDP))

    def test_what_is_doubtful_is_not_saved(self):
        sure, unsure = self.phases(1000), self.phases(1000)
        for phase in unsure:
            phase.options[:] = [replace(o, power_doubt=0.8) for o in phase.options]
        assert schedule(sure, Goal(ENERGY)).changes == 1
        assert schedule(unsure, Goal(ENERGY)).changes == 0

    def test_phases_are_priced_by_their_steps(self, tmp_path, capsys):
        """Changing costs half a joule: too much for a step, nothing for an epoch."""
        for steps, words in ((1, "does not pay"), (5000, "against one mode for all")):
            lines = ["clock,time_s,power_w,phase,steps"]
            for clock in (1, 2, 4):
                lines.append(f"{clock},0.1,{2 + clock},input,{steps}")
                lines.append(f"{clock},{0.4 / clock},{2 + clock},compute,{steps}")
            path = table(tmp_path, "\n".join(lines))
            assert main(["power", "tune", "--from", path]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert words in text and "All steps:" in text
        Path(path).write_text("\n".join([*lines, "3,0.1,5,input,7"]))
        assert main(["power", "tune", "--from", path]) == 2
        assert "phase input has 7 steps, a line before said 5000" in capsys.readouterr().err
        Path(path).write_text("\n".join(lines).replace("input,5000", "input,"))
        assert main(["power", "tune", "--from", path]) == 2
        assert "phase input does not say how many steps" in capsys.readouterr().err

    def test_a_table_with_phases(self, tmp_path, capsys):
        lines = ["clock,time_s,power_w,phase"]
        for clock in (1, 2, 4):
            lines.append(f"{clock},1.0,{2 + clock},input")
            lines.append(f"{clock},{4 / clock},{2 + clock},compute")
        path = table(tmp_path, "\n".join(lines))
        assert main(["power", "tune", "--from", path]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "each counts as one step" in text
        assert "input: clock 1" in text and "compute: clock 4" in text
        assert "against one mode for all" in text
        assert schedule(self.phases(9), Goal(TIME)).changes == 0


def test_a_meters_readings_are_kept_for_the_estimator(tmp_path, capsys):
    assert main(["power", "calibrate", "--idle", "2.7W", "--busy", "6.3W"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "idle 2.70 W" in text and "off by up to 10%" in text
    assert main(["power", "show", "--root", str(tmp_path)]) == 0
    assert "off by up to 10%" in capsys.readouterr().out
    assert main(["power", "calibrate"]) == 2
    assert main(["power", "calibrate", "--run", "nowhere", "--energy", "1Wh"]) == 2
    assert main(["power", "calibrate", "--run", "nowhere"]) == 2


def recorded(folder: Path, *, measured: float = 1.0) -> Path:
    """A run of 30 s with a streamed meter: first idle at 3 W, then two busy cores at 5 W."""
    folder.mkdir()
    notes = [("meter: external meter", 0.0, {"measured": measured, "whole": 1.0})]
    for second in range(31):
        busy_s, joules = max(second - 15, 0) * 2.0, 3.0 * second + 2.0 * max(second - 15, 0)
        notes.append(("energy", second, {"joules": joules, "watts": 3.0, "busy_s": busy_s}))
    lines = [
        Event(0, 1, "forward", "note", name, at_s, at_s, 0, tuple(told.items())).to_line()
        for name, at_s, told in notes
    ]
    (folder / "events-0.jsonl").write_text("\n".join([*lines, ""]))
    return folder


def test_a_meter_that_was_streamed_into_a_run_calibrates_the_estimator(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    assert main(["power", "calibrate", "--run", str(run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "idle 3.00 W, 1.00 W for each busy core" in text and "6 readings" in text
    estimated = recorded(tmp_path / "estimated", measured=0.0)
    assert main(["power", "calibrate", "--run", str(estimated)]) == 2
    assert "give --energy too" in capsys.readouterr().err
    assert main(["power", "calibrate", "--run", str(estimated), "--energy", "120J"]) == 0
    (run / "lab.json").write_text("{}")
    assert main(["power", "calibrate", "--run", str(run)]) == 2
    assert "a run on emulated devices" in capsys.readouterr().err

"""``terrazzo power tune``: on simulated boards, and under a real training."""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from terrazzo.boards import Rig, Workload, load_board
from terrazzo.boards.kernel import CPU
from terrazzo.boards.sensors import HWMON
from terrazzo.cli.main import main
from terrazzo.cli.search import held, reference_of, search, sooner
from terrazzo.cli.tabled import knobs_of
from terrazzo.cli.underway import steer
from terrazzo.errors import KnobError, PowerError
from terrazzo.meters.estimator import Calibration, Estimator
from terrazzo.meters.external import External
from terrazzo.meters.rapl import Rapl
from terrazzo.meters.sampler import Sampler
from terrazzo.power.benches import Spent
from terrazzo.power.selector import ENERGY, TIME, Goal
from terrazzo.power.simulated import rigged
from terrazzo.records.devicepower import load_modes
from terrazzo.records.modes import Mode, ModeTable
from terrazzo.report.screen import Screen

WORK = Workload("test", flops=2e10, bytes=2e9, launches=300, input_cycles=1e8)
HEAVY = Workload("twice", flops=4e10, bytes=4e9, launches=600, input_cycles=2e8)
pytestmark = pytest.mark.usefixtures("own_place")


def options(**more: object) -> Namespace:
    usual = {"modes": 5, "reference": None, "deadline": None, "steps": None, "save": None}
    return Namespace(**(usual | {"html": None, "root": Path("/nowhere")} | more))


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_simulated_board_says_that_it_is_one(capsys):
    arguments = ["power", "tune", "--simulate", "pi-like", "--modes", "6", "--seconds", "0.5"]
    assert main([*arguments, "--save", "rows.csv", "--html", "page.html"]) == 0
    text = words(capsys)
    assert "SIMULATED board" in text and "nothing about a real board" in text
    assert "of ten hours" in text
    assert "should be given 5 s" in text  # half a second is too short for this meter
    assert "SIMULATED" in Path("page.html").read_text()
    table = ModeTable.load(Path("rows.csv"))
    assert len(table.rows) >= 6 and table.is_simulated
    assert any(row.power_doubt != table.rows[0].power_doubt for row in table.rows)
    (plannable,) = load_modes(["rows.csv"], ["pi-0"])
    assert all(mode.title.endswith("(simulated)") for mode in plannable)
    assert main(["power", "tune", "--from", "rows.csv", "--objective", "time"]) == 0
    text = words(capsys)
    assert "SIMULATED" in text and "simulated modes" in text and "measured modes;" not in text
    reference_of(options(reference=Path("rows.csv")), knobs_of(table), Screen())
    assert "rows of rows.csv are simulated pi-like" in words(capsys)


SCRIPT = """
import time
from pathlib import Path
import torch
import terrazzo as tz

tz.init()
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
x = torch.randn(2, 1, 8, 8)
net = tz.parallelize(model, (x,))
end = time.time() + 200
while time.time() < end and not Path("page.html").exists():
    net(x).square().mean().backward()
    time.sleep(0.01)

def knobs():
    files = sorted(Path("board/sys/devices/system/cpu").rglob("*"))
    return [file.read_text() for file in files if file.name in ("online", "scaling_max_freq")]

net.eval()
time.sleep(0.5)
chosen = knobs()
end = time.time() + 12  # evaluation is measured in this mode, and the next if another is as good
while time.time() < end and knobs() == chosen:
    net(x)
    time.sleep(0.01)
"""


@contextmanager
def wall_meter(path: Path) -> Iterator[None]:
    """Something that writes the readings of a meter into a file, as fast as a meter would."""
    stop = threading.Event()

    def write() -> None:
        with path.open("a") as file:
            for number in count():
                file.write(f"{time.time():.3f} {5 + number % 7 / 50:.2f}\n")
                file.flush()
                if stop.wait(0.05):
                    return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_real_training_is_tuned_and_the_device_put_back(tmp_path, capsys, monkeypatch):
    """Training, its steps and the stream of a meter are real; the board's files take all values."""
    rig = Rig(load_board("pi-like"), tmp_path / "board", workload=WORK)
    before = {p: p.read_text().strip() for p in rig.root.rglob("*freq*/*") if p.is_file()}
    Path("train.py").write_text(SCRIPT)
    Path("meter.txt").write_text(f"{time.time():.3f} 5\n")
    monkeypatch.setenv("TERRAZZO_METER", str(tmp_path / "meter.txt"))
    arguments = ["power", "tune", "--root", str(rig.root), "--modes", "5", "--seconds", "0.2"]
    arguments += ["--run-dir", "run", "--save", "rows.csv", "--html", "page.html", "train.py"]
    with wall_meter(tmp_path / "meter.txt"):
        assert main(arguments) == 0
    text = words(capsys)
    assert "external meter meter.txt should be given 2 s" in text
    assert "Training goes on in this mode" in text
    assert "The device is as it was before" in text
    rows = ModeTable.load(Path("rows.csv")).rows
    assert len(rows) >= 6 and all(row.step_s > 0.01 for row in rows)
    assert all(5 <= row.power_w < 5.2 for row in rows)
    assert {row.phase for row in rows} == {"compute", "evaluation"}
    assert {p: p.read_text().strip() for p in before} == before
    assert not (rig.root / "state.json").exists()


def test_the_governor_left_alone_is_measured_as_it_is():
    with rigged(load_board("pi-like"), WORK) as (rig, bench):
        bench.measure_s = 0.3
        low = rig.root / CPU / "cpufreq/policy0/scaling_min_freq"
        before, mode = low.read_text(), bench.switch.read()
        row = bench.measure(mode, settled=False)
        assert low.read_text() == before
        assert row.step_s > 0
        bench.measure(Mode.of(dict(mode.values) | {"cpu_hz": 1.5e9}), settled=False)
        bench.measure(mode, settled=False)
        assert low.read_text().strip() == "2400000"


# ---- where it fails ------------------------------------------------------------------------------


def test_where_tuning_fails_training_goes_on_as_it_was(capsys):
    with rigged(load_board("orin-like"), WORK) as (rig, bench):
        before, rig.frozen = rig.kernel.mode(), True
        for path in (rig.root / HWMON).glob("curr*_input"):
            path.write_text("0")
        undo = partial(bench.switch.restore, bench.switch.state())
        problem = steer(bench, Goal(ENERGY), options(), Screen(), undo=undo)
        assert rig.kernel.mode() == before
    assert "the meter says 0 W" in str(problem)
    assert "Training goes on as it was" in words(capsys)


def test_an_error_nobody_thought_of_does_not_end_the_training(capsys):
    def fail() -> None:
        raise KnobError("the GPU was lost")

    lacking = options()
    del lacking.html
    with rigged(load_board("pi-like"), WORK) as (_, bench):
        bench.measure_s = 1.0
        problem = steer(bench, Goal(ENERGY), lacking, Screen(), undo=fail)
    assert isinstance(problem, AttributeError)
    assert "Training goes on. the GPU was lost" in words(capsys)


def test_places_and_references_are_looked_at_before_anything_runs(tmp_path, capsys):
    Path("train.py").write_text("raise SystemExit('it ran')")
    Rig(load_board("pi-like"), tmp_path / "board", workload=WORK)
    arguments = ["power", "tune", "train.py", "--root", str(tmp_path / "board")]
    assert main([*arguments, "--html", "nowhere/page.html"]) == 2
    assert "make its folder first" in capsys.readouterr().err
    Path("other.csv").write_text("cpu_mhz,time_s,power_w\n1,4,3\n2,2,4\n3,1,6\n4,1,9\n")
    assert main([*arguments, "--reference", "other.csv"]) == 2
    assert "has knobs cpu_mhz, this device has cores, cpu_hz" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("fault", ["vanishes", "hangs"])
def test_a_sensor_that_fails_is_not_tuned_by(fault):
    with rigged(load_board("orin-like"), WORK) as (rig, bench):
        mode = bench.switch.read()
        assert bench.measure(mode, settled=False).power_w > 0
        rig.frozen = True
        if fault == "vanishes":
            for path in (rig.root / HWMON).glob("curr*_input"):
                path.unlink()
        with pytest.raises(PowerError, match=r"gave no reading|very same reading"):
            bench.measure(mode, settled=True)  # for longer than a live sensor stays calm


# ---- limits --------------------------------------------------------------------------------------


def test_a_limit_of_power_is_lowered_by_what_a_meter_may_be_off(tmp_path, capsys):
    goal, screen = Goal(TIME, max_power_w=12.0), Screen()
    guess = Sampler([Estimator(Calibration(3, 1, 0.5, "a guess"))])
    with pytest.raises(PowerError, match=r"power is a guess here.*power calibrate"):
        held(goal, guess, screen)
    told = Sampler([Estimator(Calibration(3, 1, 0.1, "a meter"))])
    assert held(goal, told, screen).max_power_w == pytest.approx(12 / 1.1)
    with pytest.raises(PowerError, match="knows nothing of clocks"):
        held(Goal(ENERGY), told, screen)
    (tmp_path / "meter.txt").write_text(f"{time.time()} 5\n")
    real = Sampler([External(tmp_path / "meter.txt")])
    assert held(goal, real, screen).max_power_w == pytest.approx(12 / 1.03)
    assert held(Goal(ENERGY), real, screen) == Goal(ENERGY)
    assert "taken for 11.7 W" in words(capsys)
    (tmp_path / "energy_uj").write_text("7")
    held(goal, Sampler([Rapl(tmp_path, "package-0", 1e6)]), screen)
    assert "a limit for the processor alone" in words(capsys)


def test_what_measuring_took_is_missing_before_the_deadline():
    asked = options(steps=20_000, deadline="6h")
    with rigged(load_board("pi-like"), WORK) as (_, bench):
        bench.spent = Spent(seconds=600.0, joules=1.0, steps=100.0)
        told = sooner(Goal(ENERGY, max_step_s=1.08), bench=bench, options=asked)
    assert told.max_step_s == pytest.approx((21_600 - 600) / 19_900)


def test_a_short_training_is_not_measured_for_long():
    """200 steps are over soon: after the first modes nothing else is tried."""
    asked, counts = options(modes=15), []
    for asked.steps in (200, 10_000_000):
        with rigged(load_board("orin-like"), WORK) as (rig, bench):
            bench.measure_s = 0.5
            found = search(bench, Goal(TIME), asked, Screen(), root=rig.root)
            counts.append(len(found.tuning.rows))
    assert counts[0] < counts[1]


def test_the_parts_of_a_measurement_tell_how_sure_it_is():
    with rigged(load_board("pi-like"), WORK) as (rig, bench):
        mode, real = bench.switch.read(), rig.pause
        calm = bench.measure(mode, settled=False)

        def disturbed(seconds: float) -> None:
            real(seconds)
            if rig.time_s > until_s:
                rig.workload = HEAVY

        until_s = rig.time_s + 5.0
        bench.pause = disturbed
        wild = bench.measure(mode, settled=False)
        bench.pause = real
        again = bench.measure(mode, settled=False)
    assert wild.time_doubt > 0.15 > calm.time_doubt
    assert wild.time_doubt > again.time_doubt > calm.time_doubt  # it may happen again

"""Meters against file trees laid out like those of boards; the boards are simulated."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from terrazzo.boards import Rig, Workload, load_board
from terrazzo.boards.kernel import CPU as CPU_FOLDER
from terrazzo.boards.sensors import BATTERY, EXTERNAL, HWMON, RAPL, RAPL_RANGE_UJ
from terrazzo.errors import MeterError, UsageError
from terrazzo.meters import ina3221, rapl
from terrazzo.meters.busy import family_busy_s
from terrazzo.meters.estimator import Calibration, Estimator, kept
from terrazzo.meters.meter import Reading
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.meters.window import Account

WORK = Workload("test", flops=2e10, bytes=2e9, launches=300, input_cycles=1e8)
GUESS = Calibration(3.0, 1.0, 0.5, "a test")
SENSORS = ("hwmon", "iio", "pmic", "rapl", "battery", "external")


def rig_of(folder: Path, sensor: str) -> Rig:
    board = load_board("pi-like" if sensor == "pmic" else "orin-like")
    return Rig(board, folder, workload=WORK, sensors=(sensor,))


def meters_of(rig: Rig):
    path = rig.root / EXTERNAL
    external = path if path.exists() else None
    return find(rig.root, calibration=GUESS, external=external, clock=rig.clock)


@pytest.mark.parametrize("sensor", SENSORS)
def test_a_window_holds_what_the_board_took(tmp_path, sensor):
    rig = rig_of(tmp_path, sensor)
    found = meters_of(rig)
    assert found.is_measured, found.problems
    sampler = Sampler(found.used, clock=rig.clock)
    rig.pause(1.0)
    begun, true_j = sampler.begin(), rig.energy_j
    raw = [(rig.time_s, begun.watts)]
    random = np.random.default_rng(1)
    for turn in range(60):
        rig.workload = WORK if turn % 20 < 12 else Workload("light", 1e8, 1e8, 10, 1e6)
        rig.pause(float(random.uniform(0.08, 0.6)))
        raw.append((rig.time_s, sampler.sample().watts))
    taken = sampler.end(begun)
    integrated = sum((b - a) * (w + v) / 2 for (a, v), (b, w) in pairwise(raw))
    assert taken.seconds == pytest.approx(raw[-1][0] - raw[0][0])
    assert taken.joules == pytest.approx(rig.energy_j - true_j, rel=0.03)
    if sensor != "rapl":  # a counter knows more than its samples
        assert taken.joules == pytest.approx(integrated, rel=0.03)
    assert not taken.doubts
    assert taken.peak_w >= taken.mean_w > 0


def test_a_counter_that_wraps_around_goes_on(tmp_path):
    rig = rig_of(tmp_path, "rapl")
    meter = rapl.probe(tmp_path)[0]
    first = meter.read().joules
    true_j, turns = rig.energy_j, 0
    while rig.energy_j - true_j < 2.5 * RAPL_RANGE_UJ / 1e6:
        rig.pause(2.0)
        turns += 1
        last = meter.read().joules
    assert turns > 5
    assert last - first == pytest.approx(rig.energy_j - true_j, abs=1e-3)


def test_only_whole_packages_are_counted(tmp_path):
    rig_of(tmp_path, "rapl")
    assert [meter.name for meter in rapl.probe(tmp_path)] == ["RAPL package-0"]


def test_rails_behind_the_input_are_not_added(tmp_path):
    rig = rig_of(tmp_path, "hwmon")
    (meter,) = ina3221.probe(tmp_path)
    assert meter.name == "INA3221 VDD_IN"
    assert {rail.label for rail in meter.parts} == {"VDD_CPU_GPU_CV", "VDD_SOC"}
    for number, label in enumerate(("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), start=1):
        (rig.root / HWMON / f"in{number}_label").write_text(label)
    (meter,) = ina3221.probe(tmp_path)
    assert meter.name == "INA3221 VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    for number in (1, 2, 3):
        (rig.root / HWMON / f"in{number}_label").write_text(f"RAIL_{number}")
    with pytest.raises(MeterError, match="RAIL_1, RAIL_2, RAIL_3"):
        ina3221.probe(tmp_path)


def test_a_sensor_that_vanishes_leaves_a_gap_that_is_told_of(tmp_path):
    rig = rig_of(tmp_path, "hwmon")
    sampler = Sampler(meters_of(rig).used, clock=rig.clock)
    begun, true_j = sampler.begin(), rig.energy_j
    for turn in range(80):
        rig.pause(0.1)
        if turn == 30:
            rig.frozen = True  # so that it does not write its files again
            shutil.rmtree(tmp_path / HWMON)
        sampler.sample()
    taken = sampler.end(begun)
    assert any("no reading for 5 s" in doubt for doubt in taken.doubts)
    assert taken.joules == pytest.approx(rig.energy_j - true_j, rel=0.06)


def test_a_sensor_that_hangs_is_told_of(tmp_path):
    rig = rig_of(tmp_path, "hwmon")
    sampler = Sampler(meters_of(rig).used, clock=rig.clock)
    begun = sampler.begin()
    for _ in range(60):
        rig.pause(0.5)
        sampler.sample()
    assert not sampler.end(begun).doubts
    rig.frozen = True
    for _ in range(60):
        rig.pause(0.5)
        sampler.sample()
    assert any("very same reading" in doubt for doubt in sampler.end(begun).doubts)


def test_what_a_charger_has_promised_is_no_measurement(tmp_path):
    rig = rig_of(tmp_path, "usb-c")
    found = meters_of(rig)
    assert not found.is_measured
    assert any("agreed with the charger" in problem for problem in found.problems)


def test_the_battery_of_a_mouse_is_not_the_devices(tmp_path):
    rig = rig_of(tmp_path, "battery")
    (tmp_path / BATTERY / "scope").write_text("Device")
    assert not meters_of(rig).is_measured


def test_two_batteries_are_added(tmp_path):
    """One rests and says nothing of use, then both are drawn from."""
    rig = rig_of(tmp_path, "battery")
    shutil.copytree(tmp_path / BATTERY, tmp_path / BATTERY.replace("BAT0", "BAT1"))
    second = tmp_path / BATTERY.replace("BAT0", "BAT1")
    (second / "status").write_text("Not charging")
    (meter,) = meters_of(rig).used
    alone_w = meter.read().watts
    (second / "status").write_text("Discharging")
    assert meter.name == "battery BAT0 + BAT1"
    assert meter.read().watts == pytest.approx(2 * alone_w)
    (second / "status").write_text("Charging")
    with pytest.raises(MeterError, match="only while its battery discharges"):
        meter.read()


def test_a_clock_that_is_set_is_no_energy(monkeypatch):
    """A board without a battery for its clock is a month late until the network sets it."""
    sampler = Sampler([Told(*[Reading(watts=5.0)] * 3), Estimator(GUESS)])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 30 * 86400)
    found = find(Path("/nowhere"), calibration=GUESS)
    assert sampler.clock is not real
    assert sampler.sample().joules < 5.0 * 600
    monkeypatch.setattr(time, "time", real)
    assert 0 <= found.used[0].read().joules < 600


def test_samples_are_had_while_a_meter_is_slow():
    class Slow(Told):
        def read(self) -> Reading:
            reading = super().read()
            if not self.readings:
                begun.set()
                assert go_on.wait(60)
            return reading

    begun, go_on = threading.Event(), threading.Event()
    sampler = Sampler([Slow(*[Reading(watts=1.0)] * 2)])
    thread = threading.Thread(target=sampler.sample)
    thread.start()
    assert begun.wait(60)
    assert len(sampler.drain()) == 1
    go_on.set()
    thread.join()


class Told:
    """A meter that says what it is told to."""

    name, covers, is_measured, interval_s = "told", "board", True, 0.1
    error, moves_s, window_s = 0.0, 20.0, 1.0

    def __init__(self, *readings: Reading) -> None:
        self.readings = list(readings)

    def read(self) -> Reading:
        return self.readings.pop(0)


def test_a_counter_that_could_not_be_read_for_a_while_makes_up_for_it():
    class Gap(Told):
        def read(self) -> Reading:
            reading = super().read()
            if reading.joules is None:
                raise MeterError("not now")
            return reading

    counts = [0.0, 10.0, None, None, None, 110.0]
    account = Account(Gap(*(Reading(joules=count) for count in counts)))
    for second in range(len(counts)):
        account.take(float(second))
        if second == 4:
            assert account.joules == pytest.approx(40.0)
    assert account.joules == pytest.approx(110.0)
    assert account.gap_s == 0.0


def test_a_counter_that_begins_anew_or_jumps_costs_only_that_moment():
    counts = [100.0, 110.0, 120.0, 5.0, 15.0, 1e9, 1e9 + 10]
    account = Account(Told(*(Reading(joules=count) for count in counts)))
    for second in range(len(counts)):
        account.take(float(second))
    assert account.joules == pytest.approx(60.0)  # 10 W, also while nothing was known
    assert account.refused == 2
    assert account.gap_s == 2.0


def test_a_counter_that_moves_in_steps_loses_nothing():
    """700 W in steps of a tenth of a second, seen by two readings that lie close together."""
    account = Account(Told(*(Reading(joules=value) for value in (0.0, 0.0, 70.0, 70.0, 140.0))))
    for at_s in (0.0, 0.099, 0.101, 0.199, 0.201):
        account.take(at_s)
    assert account.joules == pytest.approx(140.0)
    assert account.refused == 0
    assert account.watts < 1000  # not 35 kW for two thousandths of a second


def test_a_gauge_that_is_slow_by_nature_does_not_hang(tmp_path):
    """Firmware looks at a battery once in a minute or so."""
    rig = rig_of(tmp_path, "battery")
    sampler = Sampler(meters_of(rig).used, clock=rig.clock)
    assert sampler.window_s == 60.0
    for frozen_s, hangs in ((100.0, False), (200.0, True)):
        rig.pause(1.0)
        sampler.sample()
        rig.frozen, begun_s = True, rig.time_s
        while rig.time_s < begun_s + frozen_s:
            rig.pause(2.0)
            sampler.sample()
        rig.frozen = False
        assert bool(sampler.doubts) == hangs


def test_a_counter_that_begins_anew_has_not_wrapped_around(tmp_path):
    rig_of(tmp_path, "rapl")
    (tmp_path / RAPL / "max_energy_range_uj").write_text("262143328850")
    (tmp_path / RAPL / "energy_uj").write_text("9000000")
    meter = rapl.probe(tmp_path)[0]
    before = meter.read().joules
    (tmp_path / RAPL / "energy_uj").write_text("1000000")
    assert meter.read().joules == before


@pytest.mark.parametrize("watts", ["9e99", "nan", "nonsense", "99999999999"])
def test_absurd_readings_are_refused(tmp_path, watts):
    rig_of(tmp_path, "battery")
    (tmp_path / BATTERY / "power_now").write_text(watts)
    found = find(tmp_path, calibration=GUESS)
    assert not found.is_measured
    assert "estimate" in found.used[0].name


def test_a_late_or_broken_line_of_an_external_meter_is_refused(tmp_path):
    rig = rig_of(tmp_path, "external")
    (meter,) = meters_of(rig).used
    path = tmp_path / EXTERNAL
    with path.open("a") as file:
        file.write("1000.5 7")  # no end of line: still being written
    assert meter.read().watts != 7
    rig.time_s += 60
    with pytest.raises(MeterError, match="60 s off"):
        meter.read()
    path.write_text(f"{rig.time_s * 1000:.0f} 7\n")
    with pytest.raises(MeterError, match="s off"):
        meter.read()
    path.write_text("what is this\n")
    with pytest.raises(MeterError, match="what is this"):
        meter.read()


def test_without_sensors_energy_is_an_estimate_and_says_so(tmp_path):
    found = find(tmp_path, calibration=GUESS)
    assert not found.is_measured
    assert "off by up to 50%" in found.used[0].name


def test_a_file_nobody_may_read_names_the_remedy(tmp_path, monkeypatch):
    rig_of(tmp_path, "rapl")
    counter = tmp_path / RAPL / "energy_uj"
    real = Path.read_text

    def refuse(path, *arguments, **options):
        if path == counter:  # root may read everything, so the kernel's refusal is put here
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    found = find(tmp_path, calibration=GUESS)
    assert not found.is_measured
    assert any("chmod a+r" in problem and "CAP_" in problem for problem in found.problems)


def test_readings_of_a_real_meter_calibrate_the_estimator(tmp_path):
    before = Calibration.guess(tmp_path)
    told = Calibration.fit([(0.0, 2.7), (4.0, 6.5), (2.0, 4.7)], before=before)
    assert told.watts(4.0) == pytest.approx(6.5, rel=0.03)
    assert told.error < before.error
    one = Calibration.fit([(4.0, 48.0)], before=before)
    assert one.watts(4.0) == pytest.approx(48.0)
    path = tmp_path / "deep" / "calibration.json"
    told.save(path)
    assert kept(path, tmp_path) == told
    assert kept(tmp_path / "none.json", tmp_path) == before
    with pytest.raises(UsageError, match="positive watts"):
        Calibration.fit([(0.0, -2.0)], before=before)
    path.write_text("{")
    with pytest.raises(UsageError, match="remove it"):
        kept(path, tmp_path)


def test_an_estimate_follows_processor_time():
    now = [0.0, 0.0]
    meter = Estimator(GUESS, busy_s=lambda: now[1], clock=lambda: now[0], share=0.5)
    now[:] = [10.0, 25.0]
    assert meter.read().joules == pytest.approx(10 * 1.5 + 25 * 1.0)


def test_the_work_of_processes_that_load_data_is_counted():
    """It is a child's child that spends a fifth of a second; the kernel counts in hundredths."""
    busy_s = family_busy_s()
    before_s = busy_s()
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # it has burnt its time, and lives
        alive_s = busy_s()
        assert alive_s - before_s > 0.185
        process.communicate("\n")
    assert busy_s() >= alive_s  # nor is it lost when it has gone


def test_a_processor_alone_is_not_the_board(tmp_path):
    rig = rig_of(tmp_path, "rapl")
    sampler = Sampler(meters_of(rig).used, clock=rig.clock)
    assert sampler.is_measured and sampler.covers == ("cpu",)
    rig = rig_of(tmp_path / "other", "hwmon")
    assert Sampler(meters_of(rig).used, clock=rig.clock).covers == ("board",)


def test_a_simulated_kernel_refuses_what_a_real_one_would(tmp_path):
    """The rig itself: knob code is only tested as far as the rig's kernel is strict."""
    rig = rig_of(tmp_path, "hwmon")
    policy = tmp_path / CPU_FOLDER / "cpufreq/policy0"
    (policy / "scaling_min_freq").write_text("1984000")
    (policy / "scaling_max_freq").write_text("729600")  # below the lower limit by now
    rig.pause(0.0)
    assert (policy / "scaling_max_freq").read_text().strip() == "1984000"
    for core in range(4, 8):
        (tmp_path / CPU_FOLDER / f"cpu{core}/online").write_text("0")
    rig.pause(0.0)
    assert rig.kernel.mode()["cores"] == 4
    assert not (tmp_path / CPU_FOLDER / "cpufreq/policy4").exists()


def test_dear_readings_come_less_often() -> None:
    sampler = Sampler([])
    assert sampler.pause_s(0.0) == sampler.interval_s
    assert sampler.pause_s(0.01 * sampler.interval_s) == pytest.approx(2 * sampler.interval_s)

"""Energy in the record of a run and in its report."""

from __future__ import annotations

import json
import shutil

import pytest

from terrazzo.boards import Rig, Workload, load_board
from terrazzo.boards.sensors import HWMON
from terrazzo.errors import UsageError
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.preset import load_presets
from terrazzo.lab.running import RunningLab
from terrazzo.lab.topology import Topology
from terrazzo.meters.estimator import Calibration
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sampler
from terrazzo.records.event import Event, read_events
from terrazzo.records.power import (
    emulated,
    emulation,
    joules_text,
    parse_joules,
    parse_seconds,
    parse_watts,
    watts_text,
)
from terrazzo.records.run import Run, RunFolder
from terrazzo.report.energy import energy_of
from terrazzo.report.energyview import remarks, sentence
from terrazzo.report.page import page
from terrazzo.report.reading import Reading
from terrazzo.report.screen import Screen
from terrazzo.report.steps import steps_of
from terrazzo.report.summary import summary_json
from terrazzo.report.terminal import show
from terrazzo.runtime.energy import EnergyLog, open_log
from terrazzo.runtime.recorder import EVERY_CALL_UNTIL, Recorder

WORK = Workload("test", flops=2e10, bytes=2e9, launches=300, input_cycles=1e8)


def note(device: int, at_s: float, name: str, **values: float) -> Event:
    return Event(device, 0, "forward", "note", name, at_s, at_s, 0, tuple(values.items()))


def two_devices() -> list[Event]:
    """Device 1 computes half as long, and waits; 10 W while anything computes, 4 W else."""
    events = [
        note(0, 0.0, "meter: a sensor", measured=1.0),
        note(1, 0.0, "meter: an estimate", measured=0.0),
    ]
    for call in range(1, 5):
        start = float(call)
        for device, busy_s in ((0, 0.8), (1, 0.4)):
            for phase, begin, length in (("forward", 0.0, 0.5), ("backward", 0.5, 0.5)):
                half = busy_s * 0.5
                at = start + begin
                events += [
                    Event(device, call, phase, "compute", "conv", at, at + half),
                    Event(device, call, phase, "exchange", "halo", at + half, at + length),
                ]
    for device, busy_s in ((0, 0.8), (1, 0.4)):
        joules = 0.0
        events.append(note(device, 1.0, "energy", joules=0.0, watts=0.0))
        for half in range(8):
            at = 1.0 + half * 0.5
            for length, watts in ((busy_s * 0.5, 10.0), (0.5 - busy_s * 0.5, 4.0)):
                at, joules = at + length, joules + length * watts
                events.append(note(device, at, "energy", joules=joules, watts=watts))
    return events


def test_a_steps_energy_is_told_by_device_and_phase():
    events = two_devices()
    found = energy_of(events, steps_of(events, 2)[1:], devices=2, samples=8)
    first, second = found.devices
    assert first.phases_j["compute"] == pytest.approx(8.0)
    assert first.phases_j["exchange"] == pytest.approx(0.8)
    assert second.phases_j["compute"] == pytest.approx(4.0)
    assert second.phases_j["idle"] == pytest.approx(1.6)  # until device 0 has arrived
    assert second.phases_j["exchange"] == pytest.approx(0.8)
    for row in found.devices:
        assert sum(row.phases_j.values()) == pytest.approx(row.step_j)
    assert first.step_j == pytest.approx(8.8) == pytest.approx(first.mean_w)
    assert first.peak_w == 10.0
    assert found.sample_j == pytest.approx(found.step_j / 8)
    assert (first.is_measured, second.is_measured, found.is_measured) == (True, False, False)


def test_parts_of_a_device_are_called_that():
    events = two_devices()
    events[:2] = [
        note(device, 0.0, "meter: RAPL package-0", measured=1.0, whole=0.0) for device in (0, 1)
    ]
    found = energy_of(events, steps_of(events, 2)[1:], devices=2, samples=8)
    assert found.is_measured and not found.is_whole
    assert "(processor and GPU alone)" in sentence(found)
    assert any("draws more" in remark for remark in remarks(found))


def test_a_device_that_told_nothing_is_in_no_sum():
    events = [e for e in two_devices() if e.device == 0 or e.name != "energy"]
    found = energy_of(events, steps_of(events, 2)[1:], devices=2, samples=0)
    assert found.missing == (1,)
    assert found.sample_j is None
    silent = [e for e in events if e.name != "energy"]
    assert energy_of(silent, steps_of(silent, 2), devices=2, samples=0) is None


def test_a_recorded_run_shows_the_boards_energy(tmp_path):
    """Through the recorder's own lines, from a simulated board's files to the page."""
    board = tmp_path / "board"
    rig = Rig(load_board("orin-like"), board, workload=WORK)
    meters = find(board, calibration=Calibration(1, 1, 0.5, ""), clock=rig.clock).used
    sampler = Sampler(meters, clock=rig.clock)
    run = tmp_path / "run"
    recorder = Recorder(run, 0).with_energy(EnergyLog(sampler, 0))
    true_j = []
    for call in range(1, 7):
        true_j.append(rig.energy_j)
        recorder.begin(call)
        for phase in ("forward", "backward"):
            recorder.phase = phase
            begin = rig.time_s - recorder._epoch
            for _ in range(4):
                rig.pause(0.1)
                sampler.sample()
            times = (begin, rig.time_s - recorder._epoch)
            recorder.stage(phase, "compute", "conv", times)
        recorder.end(sent_bytes=0, summed_bytes=0)
    recorder._close()
    RunFolder(run).write(Run.begin("test", ["train.py"], 1))
    reading = Reading.open(run)
    found = reading.energy
    assert found.is_measured
    assert found.devices[0].sources == ("INA3221 VDD_IN",)
    mean_j = (rig.energy_j - true_j[1]) / 5
    assert found.step_j == pytest.approx(mean_j, rel=0.03)
    told = json.loads(summary_json(reading))["energy"]
    assert told["measured"] and told["step_j"] == found.step_j
    assert "INA3221 VDD_IN" in page(reading)
    with (tmp_path / "out.txt").open("w+") as file:
        show(reading, Screen(file, width=100))
        file.seek(0)
        text = file.read()
    assert "J a step" in text and "estimated" not in text


def test_later_calls_keep_only_what_is_needed(tmp_path):
    board = tmp_path / "board"
    rig = Rig(load_board("orin-like"), board, workload=WORK)
    meters = find(board, calibration=Calibration(1, 1, 0.5, ""), clock=rig.clock).used
    sampler = Sampler(meters, clock=rig.clock)
    recorder = Recorder(tmp_path / "run", 0).with_energy(EnergyLog(sampler, 0))
    for call in range(EVERY_CALL_UNTIL + 1, EVERY_CALL_UNTIL + 41):
        recorder.begin(call)
        for _ in range(10):
            sampler.sample()
        recorder.end(sent_bytes=0, summed_bytes=0)
    notes = [e for e in read_events(tmp_path / "run") if e.name == "energy"]
    assert {e.call % 20 for e in notes} == {0}
    assert len(notes) == 2 * (10 + 1)


def test_energy_can_be_switched_off_and_emulated_boards_have_their_presets_watts():
    assert open_log({"TERRAZZO_POWER": "off"}, 0) is None
    log = open_log({"TERRAZZO_POWER": emulation(2.5, 20.0)}, 0)
    assert not log.sampler.is_measured
    log.sampler.stop()
    assert emulated("auto") is None and emulated("emulated x y") is None
    assert emulated(emulation(2.5, 20.0)) == (2.5, 20.0)


def test_a_board_of_the_lab_is_estimated_and_never_counts_this_machine(tmp_path):
    topology = Topology.parse("2xpi3", load_presets())
    lab = RunningLab("test", topology=topology, network=None, groups=None)
    hosts = LabHosts(lab, folder=tmp_path)
    found = hosts.environment(1, port=1, base={})
    log = open_log(found, 1)
    log.sampler.stop()
    assert not log.sampler.is_measured
    assert "emulated" in "".join(log.head())
    assert open_log(hosts.environment(1, port=1, base={"TERRAZZO_POWER": "off"}), 1) is None


def test_processes_of_one_machine_share_its_meter(tmp_path):
    rig = Rig(load_board("orin-like"), tmp_path, workload=WORK)
    meters = find(tmp_path, calibration=Calibration(1, 1, 0.5, ""), clock=rig.clock).used
    alone, shared = Sampler(meters, clock=rig.clock), Sampler(meters, clock=rig.clock, sharing=4)
    rig.pause(1.0)
    assert shared.sample().joules == pytest.approx(alone.sample().joules / 4)


def test_hours_without_a_sensor_are_told_as_hours_and_are_not_measured(tmp_path):
    rig = Rig(load_board("orin-like"), tmp_path / "board", workload=WORK)
    meters = find(rig.root, calibration=Calibration(1, 1, 0.5, ""), clock=rig.clock).used
    sampler = Sampler(meters, clock=rig.clock)
    log, begun_s = EnergyLog(sampler, 0), rig.time_s
    lines = log.head()
    for turn in range(20):
        rig.time_s += 5
        if turn == 1:
            shutil.rmtree(rig.root / HWMON)
        sampler.sample()
        lines += log.lines(turn)
    lines += log.last(20)
    events = [Event.from_line(line) for line in lines]
    told = [event.name for event in events if event.name.startswith("doubt")]
    assert 2 <= len(told) <= 7
    assert "no reading for 95 s" in told[-1]
    spans = [
        Event(0, call, phase, "compute", "conv", begun_s + call * 20, begun_s + call * 20 + 19)
        for call in range(1, 5)
        for phase in ("forward", "backward")
    ]
    found = energy_of(events + spans, steps_of(spans, 1), devices=1, samples=0)
    assert not found.is_measured
    (doubt,) = found.devices[0].doubts
    assert "95 s" in doubt


def test_a_broken_calibration_is_told_and_replaced_by_a_guess(tmp_path, monkeypatch, capsys):
    path = tmp_path / "terrazzo" / "calibration.json"
    path.parent.mkdir()
    path.write_text("{")
    log = open_log({"XDG_CONFIG_HOME": str(tmp_path)}, 0)
    log.sampler.stop()
    assert str(path) in capsys.readouterr().err


def test_what_nobody_thought_of_ends_the_telling_and_not_the_training(capsys):
    assert open_log({"LOCAL_WORLD_SIZE": "many"}, 0) is None
    assert "training goes on" in capsys.readouterr().err


def test_amounts_are_read_and_written_as_people_do():
    assert parse_watts("12W") == 12 and parse_watts("900 mW") == pytest.approx(0.9)
    assert parse_seconds("6h") == 21600 and parse_seconds("1.5min") == 90
    assert parse_joules("1Wh") == 3600
    for text in ("12 V", "-3W", "", "W", "0"):
        with pytest.raises(UsageError, match="such as 12W"):
            parse_watts(text)
    assert [watts_text(w) for w in (0.85, 6.314, 12.34, 121.4)] == [
        "850 mW", "6.31 W", "12.3 W", "121 W",
    ]  # fmt: skip
    assert [joules_text(j) for j in (0.0021, 6.314, 1234.0, 36000.0)] == [
        "2.1 mJ", "6.31 J", "1.23 kJ", "10 Wh",
    ]  # fmt: skip

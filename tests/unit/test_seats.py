"""Plans that say which devices take part in which power modes, and runs that obey them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from terrazzo.boards import Rig, load_board
from terrazzo.boards.kernel import CPU
from terrazzo.cli.main import main
from terrazzo.cli.place import Place
from terrazzo.cli.planned import PLAN, environment, read_plan, seated
from terrazzo.cluster.hosts import LocalHosts
from terrazzo.errors import UsageError
from terrazzo.lab.preset import load_presets
from terrazzo.lab.topology import Topology
from terrazzo.power.attendant import attended, kept_in
from terrazzo.power.gears import PART, Gears
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
from terrazzo.records import Group, Layout, Plan
from terrazzo.records.cluster import Cluster, ClusterDevice
from terrazzo.records.devicepower import load_modes
from terrazzo.records.event import read_events
from terrazzo.records.modes import Mode
from terrazzo.records.seat import Seat
from terrazzo.runtime.links import Links
from terrazzo.seating import KNOBS, take_seat

CALM = Mode.of({"cores": 2, "cpu_hz": 1.5e9})
FAST = Mode.of({"cores": 4, "cpu_hz": 2.4e9})
GROUPS = (Group("out", Layout()),)


@pytest.fixture
def rig(tmp_path):
    return Rig(load_board("pi-like"), tmp_path / "board")


def files(rig: Rig) -> dict[str, str]:
    paths = [p for p in (rig.root / CPU).rglob("*") if p.is_file()]
    return {str(path): path.read_text().strip() for path in paths}


def plan(*seats: Seat) -> Plan:
    return Plan("0123", len(seats), GROUPS, seats)


class TestRecord:
    def test_seats_come_back_and_old_plans_have_none(self):
        kept = plan(Seat("pi5-0", CALM, (("evaluation", FAST),)), Seat("pi3-1"))
        assert Plan.from_json(kept.to_json()) == kept
        assert "pi5-0: 2 cores, CPU 1.5 GHz; evaluation: 4 cores, CPU 2.4 GHz" in str(kept)
        old = Plan("0123", 2, GROUPS)
        assert "seats" not in json.loads(old.to_json())
        assert Plan.from_json(old.to_json()).seats == ()

    def test_as_many_seats_as_devices(self):
        body = json.loads(plan(Seat("a"), Seat("b")).to_json())
        body["seats"].pop()
        with pytest.raises(UsageError, match="1 seats for 2 devices"):
            Plan.from_json(json.dumps(body))


class TestTables:
    TUNED = (
        "cores,cpu_hz,time_s,power_w\n4,2.4e9,1.0,10\n4,1.5e9,1.5,6\n2,2.4e9,1.6,7\n2,1.5e9,2.5,4\n"
    )

    def test_what_tuning_saves_is_what_planning_reads(self, tmp_path):
        path = tmp_path / "rows.csv"
        path.write_text(self.TUNED)
        for text in (str(path), f"pi5={path}", f"pi5-0={path}"):
            (modes,) = load_modes([text], ["pi5-0"])
            assert [mode.slowness for mode in modes] == [1.0, 1.5, 2.5]
            assert [mode.busy_w for mode in modes] == [10, 6, 4]
            assert modes[0].mode == FAST and modes[-1].mode == CALM
        with pytest.raises(UsageError, match="says nothing of nano"):
            load_modes([f"pi5={path}"], ["nano"])

    def test_phases_have_modes_of_their_own_where_those_take_less(self, tmp_path):
        lines = ["cores,cpu_hz,time_s,power_w,phase"]
        for line in self.TUNED.splitlines()[1:]:
            knobs, _, power_w = line.rpartition(",")
            lines += [f"{line},compute", f"{knobs.rpartition(',')[0]},0.5,{power_w},evaluation"]
        (tmp_path / "rows.csv").write_text("\n".join(lines))
        (modes,) = load_modes([str(tmp_path / "rows.csv")], ["pi5-0"])
        assert [mode.slowness for mode in modes] == [1.0, 1.5, 2.5]
        assert [mode.phases for mode in modes] == [(("evaluation", CALM),)] * 2 + [()]

    def test_knobs_may_be_written_by_hand(self, tmp_path):
        path = tmp_path / "own.csv"
        path.write_text(
            "device,mode,slowness,busy_w,idle_w,cores\n*,calm,2,5,2,2\n*,as it comes,1,9,3,\n"
        )
        ((fast, calm),) = load_modes([str(path)], ["nano"])
        assert (fast.mode, calm.mode) == (None, Mode.of({"cores": 2}))

    def test_a_plan_keeps_devices_and_modes(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "rows.csv").write_text(self.TUNED)
        (tmp_path / "net.py").write_text(
            "from torch import nn\n\ndef build():\n    return nn.Conv2d(3, 8, 3, padding=1)\n"
        )
        command = ["plan", f"{tmp_path / 'net.py'}:build", "--input", "2x3x32x32"]
        command += ["--on", "2xpi3", "--power-budget", "4W", "--power", str(tmp_path / "rows.csv")]
        assert main([*command, "--save", str(tmp_path / "plan.json")]) == 0
        assert "pi3-0: 2 cores, CPU 1.5 GHz" in capsys.readouterr().out
        kept = read_plan(tmp_path / "plan.json")
        assert kept.seats == (Seat("pi3-0", CALM),) and kept.devices == 1


class TestPlaces:
    """A run is on the devices of its plan, in the plan's order, and on no others."""

    def test_emulated(self):
        place = Place(None, Topology.parse("2xpi5,2xpi3", load_presets()))
        found = seated(place, plan(Seat("pi5-1"), Seat("pi3-2")), Path("plan.json"))
        assert found.topology.names == ("pi5-1", "pi3-2")
        with pytest.raises(UsageError, match="so nano-7 is missing"):
            seated(place, plan(Seat("nano-7")), Path("plan.json"))

    def test_real(self):
        devices = tuple(ClusterDevice(name=name, host=f"{name}.local") for name in "abc")
        place = Place(None, None, cluster=Cluster(devices))
        found = seated(place, plan(Seat("c"), Seat("a")), Path("plan.json"))
        assert found.cluster.names == ("c", "a")
        assert found.cluster.devices[0].host == "c.local"

    def test_here(self):
        place = Place(LocalHosts(3), None)
        assert seated(place, plan(Seat("x"), Seat("y")), Path("p")).devices == 2
        with pytest.raises(UsageError, match="for 2 devices, --on names 3"):
            seated(place, Plan("0123", 2, GROUPS), Path("p"))

    def test_no_plan_and_one_that_is_too_large(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_plan(tmp_path / "none.json")
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(UsageError, match=r"bad\.json: this is no plan"):
            read_plan(tmp_path / "bad.json")
        with pytest.raises(UsageError, match="can be handed over"):
            self.handed(Plan("0", 1, GROUPS * 4000))

    def handed(self, given: Plan, place: Place | None = None) -> Plan:
        here = place or Place(LocalHosts(1), None)
        return Plan.from_json(environment(given, Path("p"), hosts=LocalHosts(1), place=here)[PLAN])

    def test_modes_of_boards_are_not_for_this_machine(self, capsys):
        """Emulated devices that nothing emulates: plain processes here, without root."""
        given = plan(Seat("pi5-0", CALM))
        assert self.handed(given) == given
        place = Place(None, Topology.parse("1xpi5", load_presets()))
        assert self.handed(given, place).seats == (Seat("pi5-0"),)
        assert "modes of the plan are left out" in capsys.readouterr().err


class TestGears:
    """On the knobs of a board, by the board's own time."""

    def gears(self, rig: Rig, seat: Seat) -> Gears:
        panel = Panel.find(Sysfs(rig.root, rig.pause))
        before = panel.state()

        class Device:
            read, apply = panel.read, panel.apply

            def restore(self) -> None:
                panel.restore(before)

            close = restore

        return Gears(Device(), seat, clock=rig.clock)

    def test_a_phase_gets_its_mode_when_that_pays(self, rig):
        gears = self.gears(rig, Seat("pi", FAST, (("evaluation", CALM),)))
        first = gears.begin()
        assert first is not None and first.took_s > 0
        assert gears.enter("evaluation") is None  # nobody knows yet how long it lasts
        assert gears.go_on() is None
        rig.pause(first.took_s / PART)
        change = gears.go_on()
        assert change is not None and change.text == CALM.text
        assert rig.kernel.mode()["cores"] == 2
        rig.pause(20.0)
        gears.enter("compute")
        rig.pause(20.0)
        assert gears.go_on().text == FAST.text
        assert gears.enter("evaluation").text == CALM.text  # it was long enough, the last time
        rig.pause(0.001)
        assert gears.enter("compute").text == FAST.text
        assert gears.enter("evaluation") is None  # and now it was not
        assert gears.close() == ""

    def test_without_a_mode_of_its_own_a_device_is_as_it_was(self, rig):
        before = rig.kernel.mode()
        gears = self.gears(rig, Seat("pi", None, (("evaluation", CALM),)))
        assert gears.begin() is None
        gears.enter("evaluation")
        assert rig.kernel.mode()["cores"] == 2
        gears.enter("compute")
        rig.pause(20.0)
        assert gears.go_on().text == "as it was"
        assert rig.kernel.mode() == before

    def test_what_is_refused_is_not_asked_for_again(self, rig):
        gears = self.gears(rig, Seat("pi", Mode.of({"cores": 99})))
        assert "99 cores is not possible" in gears.begin().refusal
        rig.pause(20.0)
        assert gears.go_on() is None


class TestSeats:
    def seated(self, rig_root: Path, *seats: Seat, number: int = 0, **more: str) -> Links:
        links = Links()
        given = {PLAN: plan(*seats).to_json(), KNOBS: str(rig_root), **more}
        take_seat(links, given, number)
        return links

    def test_each_device_has_its_own(self, rig):
        before = files(rig)
        links = self.seated(rig.root, Seat("a", FAST), Seat("b", CALM), number=1)
        assert Panel.find(Sysfs(rig.root)).read() == CALM
        assert kept_in(rig.root).exists()
        assert links.gears.close() == ""
        assert files(rig) == before and not kept_in(rig.root).exists()

    def test_no_knobs_no_modes_and_the_run_goes_on(self, tmp_path, capsys):
        assert self.seated(tmp_path, Seat("a", CALM)).gears is not None
        assert "not in mode 2 cores, CPU 1.5 GHz: there is no knob cores here" in (
            capsys.readouterr().err
        )
        assert self.seated(tmp_path, Seat("a"), Seat("b", CALM)).gears is None

    def test_devices_of_one_machine_have_one_mode(self, rig, capsys):
        here = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        assert self.seated(rig.root, Seat("a", CALM), Seat("b", FAST), **here).gears is None
        assert "2 devices share this machine" in capsys.readouterr().err
        links = self.seated(rig.root, Seat("a", CALM), Seat("b", CALM), **here)
        assert links.gears is not None and links.gears.close() == ""
        other = here | {"LOCAL_RANK": "1"}
        assert self.seated(rig.root, Seat("a", CALM), Seat("b", CALM), **other).gears is None


def test_a_process_that_holds_the_pipe_open_does_not_keep_the_device(rig):
    """As a data loader's workers do: they are forked, and have all that was open."""
    before = files(rig)
    device = attended(rig.root).__enter__()
    device.apply(CALM)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        device.close()
        assert files(rig) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


SCRIPT = """
import os, signal
from pathlib import Path
import torch
import terrazzo as tz

tz.init()
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
x = torch.randn(2, 1, 8, 8)
net = tz.parallelize(model, (x,))
net(x).square().mean().backward()
clock = Path(os.environ["TERRAZZO_KNOBS"], "sys/devices/system/cpu/cpufreq/policy0")
print("clock", (clock / "scaling_max_freq").read_text().strip(), flush=True)
os.killpg(os.getpgid(0), signal.SIGKILL)
"""
MODEL = """
import torch

def build():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
"""


def test_a_run_is_in_the_modes_of_its_plan_and_the_device_put_back_after_a_kill(
    rig, tmp_path, monkeypatch, capfd
):
    from terrazzo.cli.model import ModelReference
    from terrazzo.cli.plan import exported
    from terrazzo.cli.tensor import TensorSpec
    from terrazzo.planner import plan_graph

    before = files(rig)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("net.py").write_text(MODEL)
    model = ModelReference.parse("net.py:build").build()
    graph, _ = exported(model, [TensorSpec.parse("2x1x8x8")])
    made = plan_graph(graph, 1, layout="auto", groups="one")
    Plan(made.graph, 1, made.groups, (Seat("device0", CALM),)).save("plan.json")
    monkeypatch.setenv(KNOBS, str(rig.root))
    command = ["run", "--on", "1", "--plan", "plan.json", "--run-dir", "run", "train.py"]
    assert main(command) == 128 + signal.SIGKILL
    assert "clock 1500000" in capfd.readouterr().out
    for _ in range(500):
        if not kept_in(rig.root).exists():
            break
        time.sleep(0.02)
    assert files(rig) == before
    names = [event.name for event in read_events(Path("run"))]
    assert f"mode: {CALM.text}" in names
    assert Plan.load("run/plan.json").groups == made.groups

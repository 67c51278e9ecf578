"""Knobs against the files of a simulated board, whose kernel refuses what a real one would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrazzo.boards import Rig, load_board
from terrazzo.boards.kernel import EMC
from terrazzo.errors import KnobError, MeterError
from terrazzo.power.accelerator import GpuLimit, memory_is_hidden
from terrazzo.power.keeper import Keeper
from terrazzo.power.panel import Panel, all_modes
from terrazzo.power.presets import parse, presets
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.modes import Mode

sys.path.insert(0, str(Path(__file__).parent))
from rigs import LOW, tree


def test_a_board_has_the_knobs_of_its_model(rig, panel):
    assert panel.knobs == rig.board.knobs
    assert panel.governors == {"cpu_hz": "schedutil", "gpu_hz": "nvhost_podgov", "mem_hz": "bpmp"}
    assert dict(panel.read().values) == rig.kernel.mode()
    pi = Rig(load_board("pi-like"), rig.root.parent / "pi")
    assert set(Panel.find(Sysfs(pi.root, pi.pause)).knobs) == {"cores", "cpu_hz"}


def test_a_mode_is_applied_and_all_put_back(rig, panel):
    before, files = tree(rig), panel.state()
    panel.apply(Mode.of(LOW))
    assert rig.kernel.mode() == LOW
    panel.apply(Mode.of({name: values[-1] for name, values in panel.knobs.items()}))
    panel.apply(Mode.of(LOW))
    panel.restore(files)
    assert tree(rig) == before


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_mode_follows_any_other(data, rig, panel):
    for _ in range(3):
        drawn = {name: data.draw(st.sampled_from(values)) for name, values in panel.knobs.items()}
        panel.apply(Mode.of(drawn))
        assert rig.kernel.mode() == drawn


@pytest.mark.parametrize(
    "name", ["cpu3/online", "policy0/scaling_max_freq", "gpu/max_freq", "emc/rate"]
)
def test_a_knob_that_refuses_leaves_the_device_as_it_was(rig, panel, name):
    before = tree(rig)
    rig.kernel.stubborn.add(name)
    with pytest.raises(KnobError, match=r"was told .* and says"):
        panel.apply(Mode.of(LOW))
    rig.pause(0.0)
    assert tree(rig) == before


def test_what_a_device_does_not_have_is_refused(panel):
    with pytest.raises(KnobError, match="no knob fan"):
        panel.apply(Mode.of({"fan": 1}))
    with pytest.raises(KnobError, match=r"CPU 1\.23 GHz is not possible"):
        panel.apply(Mode.of({"cpu_hz": 1.234e9}))


def test_without_the_right_to_write_the_remedy_is_named(rig, panel, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)  # root may write everything
    with pytest.raises(KnobError, match="sudo"):
        panel.apply(Mode.of(LOW))


def test_presets_are_read_as_modes_and_those_that_need_a_reboot_left_alone(rig, panel):
    found = {preset.name: preset for preset in presets(rig.root, panel.knobs)}
    for name, mode in rig.board.presets:
        assert dict(found[name].mode.values) == dict(mode)
    assert found["REBOOT_7W"].mode is None
    assert "reboot" in found["REBOOT_7W"].reason
    assert presets(rig.root / "nowhere", panel.knobs) == []
    odd = "< POWER_MODEL ID=3 NAME=ODD >\nGPU MAX_FREQ 500000000\nEMC MAX_FREQ what\n"
    (preset,) = parse(odd, panel.knobs)
    assert preset.mode["gpu_hz"] == 408e6  # the highest that is not above
    assert preset.mode["mem_hz"] == 3199e6


def test_presets_that_gate_as_the_present_one_need_no_reboot(rig, panel):
    """Real files say in every model which cores of the GPU are on."""
    models = [("MAXN", 252), ("15W", 252), ("7W", 254)]
    text = "\n".join(
        f"< POWER_MODEL ID={n} NAME={name} >\nTPC_POWER_GATING TPC_PG_MASK {mask}\n"
        for n, (name, mask) in enumerate(models)
    )
    (rig.root / "etc/nvpmodel.conf").write_text(text + "< PM_CONFIG DEFAULT=1 >\n")
    found = {preset.name: preset.mode is not None for preset in presets(rig.root, panel.knobs)}
    assert found == {"MAXN": True, "15W": True, "7W": False}
    status = rig.root / "var/lib/nvpmodel/status"
    status.parent.mkdir(parents=True)
    status.write_text("pmode:0002\n")
    found = {preset.name: preset.mode is not None for preset in presets(rig.root, panel.knobs)}
    assert found == {"MAXN": False, "15W": False, "7W": True}


def test_the_gpu_of_another_maker_is_left_alone(rig):
    (rig.root / "proc/device-tree/compatible").write_text("rockchip,rk3588\0")
    assert "gpu_hz" not in Panel.find(Sysfs(rig.root)).knobs


class TestKeeper:
    def test_the_state_is_on_disk_before_the_first_change(self, rig, panel, tmp_path):
        keeper, before = Keeper(tmp_path / "deep" / "state.json"), tree(rig)
        with keeper.borrowed(panel):
            assert tree(rig) == before
            saved = json.loads(keeper.path.read_text())
            assert len(saved["files"]) == 7 + 4 + 2 + 2
            panel.apply(Mode.of(LOW))
        assert tree(rig) == before
        assert not keeper.path.exists()

    def test_an_exception_puts_all_back(self, rig, panel, tmp_path):
        keeper, before = Keeper(tmp_path / "state.json"), tree(rig)

        def fail() -> None:
            with keeper.borrowed(panel):
                panel.apply(Mode.of(LOW))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert tree(rig) == before

    def test_after_a_kill_the_next_start_puts_all_back(self, rig, panel, tmp_path):
        """A real process, killed in the middle of switching."""
        before, state = tree(rig), tmp_path / "state.json"
        script = f"""
import os, signal
from pathlib import Path
from terrazzo.boards import Rig, load_board
from terrazzo.power.keeper import Keeper
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.modes import Mode
rig = Rig(load_board("orin-like"), Path({str(rig.root)!r}))
count = 0
def pause(seconds):
    global count
    rig.pause(seconds)
    count += 1
    if count == 9:  # some knobs are set, others are not
        os.kill(os.getpid(), signal.SIGKILL)
panel = Panel.find(Sysfs(rig.root, pause))
with Keeper(Path({str(state)!r})).borrowed(panel):
    panel.apply(Mode.of({LOW!r}))
"""
        done = subprocess.run([sys.executable, "-c", script], timeout=60)
        assert done.returncode == -signal.SIGKILL
        rig.pause(0.0)
        assert tree(rig) != before
        words = Keeper(state).restore_left(panel)
        assert "put back" in words
        assert tree(rig) == before
        assert Keeper(state).restore_left(panel) == ""

    def test_a_process_that_lives_keeps_others_away(self, rig, panel, tmp_path):
        keeper = Keeper(tmp_path / "state.json")
        with keeper.borrowed(panel):
            body = json.loads(keeper.path.read_text())
            with subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
            ) as other:
                stat = Path(f"/proc/{other.pid}/stat").read_text()
                body |= {"process": other.pid, "began": stat.rpartition(")")[2].split()[19]}
                keeper.path.write_text(json.dumps(body))
                with pytest.raises(KnobError, match=f"process {other.pid} is changing"):
                    keeper.restore_left(panel)
                other.communicate(b"\n")

    def test_a_reboot_has_put_all_back_already(self, rig, panel, tmp_path):
        keeper = Keeper(tmp_path / "state.json")
        with keeper.borrowed(panel):
            body = json.loads(keeper.path.read_text())
        keeper.path.write_text(json.dumps(body | {"boot": "another", "process": 1}))
        panel.apply(Mode.of(LOW))
        assert keeper.restore_left(panel) == ""
        assert rig.kernel.mode() == LOW
        assert not keeper.path.exists()

    def test_a_damaged_file_is_told_of(self, panel, tmp_path):
        keeper = Keeper(tmp_path / "state.json")
        keeper.path.write_text('{"terrazzo": "power state", "version": 1}')
        with pytest.raises(KnobError, match="reboot"):
            keeper.restore_left(panel)

    def test_nothing_is_changed_where_nothing_can_be_saved(self, rig, panel, tmp_path):
        (tmp_path / "file").write_text("")
        keeper = Keeper(tmp_path / "file" / "state.json")
        with pytest.raises(KnobError, match="nothing is changed"), keeper.borrowed(panel):
            pytest.fail("it began")

    def test_a_limit_for_heat_is_not_taken_for_the_owners(self, rig, panel, tmp_path):
        cooling = rig.root / "sys/class/thermal/cooling_device0"
        cooling.mkdir(parents=True)
        (cooling / "type").write_text("cpufreq-cpu0\n")
        (cooling / "cur_state").write_text("2\n")
        keeper = Keeper(tmp_path / "state.json")
        with pytest.raises(KnobError, match="step 2 of cooling"), keeper.borrowed(panel):
            pytest.fail("it began")
        (cooling / "cur_state").write_text("0\n")
        with keeper.borrowed(panel):
            assert keeper.left() is not None

    def test_clocks_of_cores_that_were_off_are_put_back_too(self, rig, panel, tmp_path):
        every = tree(rig)
        panel.apply(Mode.of({"cores": 4}))
        before = tree(rig)
        with Keeper(tmp_path / "state.json").borrowed(panel):
            assert tree(rig) == before
            panel.apply(Mode.of(LOW | {"cores": 8.0}))
        assert tree(rig) == before
        panel.apply(Mode.of({"cores": 8}))
        assert tree(rig) == every

    def test_of_two_that_begin_at_once_one_is_refused(self, panel, tmp_path):
        keeper = Keeper(tmp_path / "state.json")
        with (
            keeper.borrowed(panel),
            pytest.raises(KnobError, match=f"process {os.getpid()} is changing"),
            keeper.borrowed(panel),
        ):
            pytest.fail("both began")

    def test_a_second_signal_does_not_cut_putting_back_in_half(self, rig, tmp_path):
        def pause(seconds: float) -> None:
            rig.pause(seconds)
            if leaving:
                os.kill(os.getpid(), signal.SIGINT)

        leaving: list[bool] = []
        panel, before = Panel.find(Sysfs(rig.root, pause)), tree(rig)
        with Keeper(tmp_path / "state.json").borrowed(panel):
            panel.apply(Mode.of(LOW))
            leaving.append(True)
        assert tree(rig) == before


class TestPuttingBack:
    def test_memory_is_unlocked_also_where_its_rate_is_refused(self, rig, panel):
        files = panel.state()
        panel.apply(Mode.of(LOW))
        rig.kernel.stubborn.add("emc/rate")
        panel.restore(files)
        assert (rig.root / EMC / "mrq_rate_locked").read_text().strip() == "0"

    def test_a_lost_gpu_does_not_keep_the_others(self, rig, panel):
        class Lost:
            index = 0

            def limit_w(self) -> float:
                raise MeterError("the GPU was lost")

            def set_limit_w(self, watts: float) -> None:
                raise MeterError("the GPU was lost")

        before, files = tree(rig), panel.state()
        both = Panel((GpuLimit(Lost(), (100.0, 200.0)), *panel.parts))
        panel.apply(Mode.of(LOW))
        with pytest.raises(KnobError, match="GPU was lost"):
            both.restore([("nvml:0:limit", "200"), *files])
        assert tree(rig) == before

    def test_memory_that_only_root_may_see_is_no_crash(self, rig, monkeypatch):
        real = os.stat

        def refuse(path, *arguments, **options):
            if EMC in str(path):  # root may look everywhere, so the kernel's refusal is put here
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        (rig.root / EMC / "rate").unlink()
        monkeypatch.setattr(os, "stat", refuse)
        assert "mem_hz" not in Panel.find(Sysfs(rig.root)).knobs
        assert memory_is_hidden(Sysfs(rig.root))


def test_modes_are_all_combinations(panel):
    assert len(all_modes(panel.knobs)) == 8 * 13 * 9 * 4
    assert GpuLimit.find("libthereisnone.so") == []

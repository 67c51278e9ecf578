"""The helper with root's rights: a few actions, and all is put back when it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.boards import Rig
from terrazzo.errors import HelperGone, KnobError
from terrazzo.power.assistant import HELPER, Assistant
from terrazzo.power.helper import answer, open_to_others, serve
from terrazzo.power.keeper import Keeper
from terrazzo.records.modes import Mode

sys.path.insert(0, str(Path(__file__).parent))
from rigs import LOW, tree


class TestHelper:
    def test_only_known_actions_with_known_arguments(self, rig, panel):
        before = tree(rig)
        for line in (
            '{"do": "write", "path": "/etc/passwd", "text": "x"}',
            '{"do": ["apply"]}',
            "[1, 2]",
            "{",
            '{"do": "apply"}',
            '{"do": "apply", "mode": {"cores": true}}',
            '{"do": "apply", "mode": {"cores": "4; reboot"}}',
            '{"do": "apply", "mode": {"../../etc": 1}}',
            '{"do": "apply", "mode": {"cpu_hz": 99e9}}',
            '{"do": "apply", "mode": {"cores": NaN}}',
            json.dumps({"do": "read", "more": "x" * 5000}),
            "[" * 4000,
        ):
            assert "error" in answer(line, panel, []), line
        assert tree(rig) == before

    def test_all_is_put_back_when_the_requests_end(self, rig, panel, tmp_path):
        before, replies = tree(rig), io.StringIO()
        lines = [json.dumps({"do": "apply", "mode": LOW}), '{"do": "read"}', '{"do": "nothing"}']
        serve(panel, Keeper(tmp_path / "s.json"), io.StringIO("\n".join(lines)), replies)
        told = [json.loads(line) for line in replies.getvalue().splitlines()]
        assert told[0]["mode"] == LOW == told[1]["mode"]
        assert "no action 'nothing'" in told[2]["error"]
        assert tree(rig) == before

    def command(self, rig: Rig, state: Path) -> list[str]:
        """The helper on a board of files; on a device it takes neither root nor place."""
        script = f"""
import sys
from pathlib import Path
from terrazzo.power.helper import work
from terrazzo.power.keeper import Keeper
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
sys.exit(work(Panel.find(Sysfs(Path({str(rig.root)!r}))), Keeper(Path({str(state)!r}))))
"""
        return [sys.executable, "-c", script]

    def test_an_asker_that_is_killed_leaves_nothing_behind(self, rig, tmp_path):
        """Real processes; the files take every value, so nothing here depends on the rig's time."""
        before, state = tree(rig), tmp_path / "state.json"
        script = f"""
import os, signal
from terrazzo.power.assistant import Assistant
from terrazzo.records.modes import Mode
with Assistant({self.command(rig, state)!r}) as switch:
    assert set(switch.knobs) == {set(LOW)!r}
    switch.apply(Mode.of({LOW!r}))
    assert switch.read() == Mode.of({LOW!r})
    os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", script], timeout=60)
        assert done.returncode == -signal.SIGKILL
        for _ in range(500):
            if not state.exists():
                break
            time.sleep(0.02)
        assert {k: v.strip() for k, v in tree(rig).items()} == {
            k: v.strip() for k, v in before.items()
        }

    def test_refusals_come_back_as_errors(self, rig, tmp_path):
        with Assistant(self.command(rig, tmp_path / "state.json")) as switch:
            with pytest.raises(KnobError, match="not possible"):
                switch.apply(Mode.of({"cores": 99}))
            switch.apply(Mode.of({"cores": 3}))
        rig.pause(0.0)
        assert rig.kernel.mode()["cores"] == 8

    def test_a_helper_that_may_not_start_says_so(self):
        with pytest.raises(HelperGone, match="needs root"), Assistant(["false"]):
            pytest.fail("it began")

    def test_a_helper_that_hangs_is_not_waited_for(self):
        silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with (
            pytest.raises(HelperGone, match=r"not answered for 0\.2 s"),
            Assistant(silent, answers_within_s=0.2),
        ):
            pytest.fail("it answered")

    def test_the_knob_that_refuses_is_named(self, rig, panel):
        rig.kernel.stubborn.add("gpu/max_freq")
        told = answer(json.dumps({"do": "apply", "mode": LOW}), panel, [])
        assert told["knob"] == "gpu_hz" and "something else holds it" in told["error"]

    def test_it_never_runs_what_lies_in_the_current_folder(self, tmp_path):
        trap = tmp_path / "terrazzo" / "power"
        trap.mkdir(parents=True)
        for folder in (trap, trap.parent):
            (folder / "__init__.py").write_text("")
        (trap / "helper.py").write_text("print('code of the current folder')")
        done = subprocess.run(
            [*HELPER, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert "current folder" not in done.stdout
        assert "with the right to change power modes" in " ".join(done.stdout.split())

    def test_code_that_others_may_change_is_found(self, tmp_path):
        if os.geteuid() != 0:
            pytest.skip("NOT tested: only root can make files that are root's")
        tmp_path.chmod(0o755)
        file = tmp_path / "lib" / "code.py"
        file.parent.mkdir(mode=0o755)
        file.write_text("")
        file.chmod(0o644)
        known = set(open_to_others([tmp_path]))
        assert set(open_to_others([file])) == known
        file.chmod(0o664)
        assert file in open_to_others([file])
        file.chmod(0o644)
        file.parent.chmod(0o777)
        assert file.parent in open_to_others([file])
        file.parent.chmod(0o755)
        os.chown(file, 1000, -1)
        assert file in open_to_others([file])
        (tmp_path / "link").symlink_to(file)
        assert file in open_to_others([tmp_path / "link"])

    def test_a_killed_helper_is_no_device_put_back(self, rig, tmp_path):
        with Assistant(self.command(rig, tmp_path / "state.json")) as switch:
            switch.apply(Mode.of({"cores": 3}))
            switch._process.kill()
            switch._process.wait()
            with pytest.raises(HelperGone):
                switch.read()
            with pytest.raises(KnobError, match=r"killed by signal 9.*power restore"):
                switch.close()
        assert Keeper(tmp_path / "state.json").left() is not None

    def test_a_helper_that_could_not_put_back_is_heard(self):
        script = (
            "import sys; input(); print('{\"knobs\": {}}', flush=True); sys.stdin.read(); "
            'print(\'{"error": "not all could be put back: cpu3"}\'); sys.exit(1)'
        )
        with (
            pytest.raises(KnobError, match="not all could be put back: cpu3"),
            Assistant([sys.executable, "-c", script]) as switch,
        ):
            assert switch.knobs == {}

    def test_signals_do_not_end_it_before_its_asker(self, rig, tmp_path):
        state, before = tmp_path / "state.json", rig.kernel.mode()
        with Assistant(self.command(rig, state)) as switch:
            switch.apply(Mode.of({"cores": 3}))
            switch._process.send_signal(signal.SIGINT)
            assert switch.read()["cores"] == 3
            switch.restore()
            assert dict(switch.read().values) == before
            switch.apply(Mode.of({"cores": 2}))
            switch._process.send_signal(signal.SIGTERM)
        assert not state.exists()
        rig.pause(0.0)
        assert rig.kernel.mode() == before

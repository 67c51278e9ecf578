"""Run folders and reports: a real run of two devices, whole, cut off, old, on poor terminals."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from terrazzo.cli.main import main
from terrazzo.demo.progress import TrainingProgress
from terrazzo.records.run import Run, RunFolder
from terrazzo.report.page import page
from terrazzo.report.reading import Reading, newest
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import terrazzo as tz

tz.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                      nn.Conv2d(4, 2, 3, padding=1))
x = torch.randn(2, 3, 24, 20)
net = tz.parallelize(model, (x,))
for step in range(1, int(sys.argv[1]) + 1):
    loss = net(x).square().mean()
    loss.backward()
    tz.log(loss=loss, rate=0.5 / step)
    if step == 4:
        tz.log(step=4, accuracy=float("nan"))
    if step > 5:
        time.sleep(0.05)
"""


def terrazzo(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "terrazzo.cli", *words]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, timeout=200, check=False, **options
    )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, and one recorded run of it."""
    place = tmp_path_factory.mktemp("desk")
    (place / "train.py").write_text(SCRIPT)
    done = terrazzo("run", "--on", "2", "train.py", "4", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "terrazzo: recorded in runs/" in done.stderr
    return place


@pytest.fixture(scope="module")
def recorded(desk: Path) -> Path:
    (folder,) = (desk / "runs").iterdir()
    return folder


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


class Loads(HTMLParser):
    """Collects what a page would fetch, and whether its elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(name)
        for key, value in attributes:
            if key in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.addresses.append(value or "")
        if name not in ("meta", "br", "img", "wbr", "input", "hr"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


class TestRecordedRun:
    def test_the_record(self, recorded: Path) -> None:
        run = RunFolder(recorded).read()
        assert run is not None
        assert (run.name, run.devices, run.status, run.failure) == ("train", 2, "done", "")
        assert run.command[1:] == ("train.py", "4")
        assert run.machine.cores >= 1 and run.machine.torch

    def test_every_section_finds_its_numbers(self, recorded: Path) -> None:
        reading = Reading.open(recorded)
        assert sorted(reading.losses) == [1, 2, 3, 4]
        assert [step.call for step in reading.steps if step.is_whole] == [1, 2, 3, 4]
        assert [memory.device for memory in reading.memory] == [0, 1]
        assert all(
            0 < memory.idle_bytes <= memory.ready_bytes < memory.peak_bytes * 1.01
            for memory in reading.memory
        )
        assert list(reading.curves) == ["loss", "rate", "accuracy"]
        assert reading.curves["rate"] == {1: 0.5, 2: 0.25, 3: 0.5 / 3, 4: 0.125}
        assert math.isnan(reading.curves["accuracy"][4])
        # Two rows of tiles. Of the middle map (2, 4, 24, 20) one row goes to the other device, and
        # its gradient comes back; of the output (2, 2, 24, 20) each sends its half. In float32:
        expected = 4 * (2 * (2 * 4 * 20) + 2 * 2 * 12 * 20)
        assert [sent["exchange"] for sent in reading.sent_bytes.values()] == [expected] * 2
        for step in reading.settled:
            for device in range(2):
                split = step.split(device)
                assert min(split.values()) >= 0
                assert split["compute"] > 0
                assert sum(split.values()) <= step.seconds * 1.0001

    def test_in_the_terminal(self, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main(["report", str(recorded), "--html", str(recorded.parent.parent / "r.html")]) == 0
        )
        text = capsys.readouterr().out
        for words in ("2 devices, done after", "input 24x20", "device 1", "x 2 devices",
                      "Memory per device", "Bytes sent", "compute"):  # fmt: skip
            assert words in text

    def test_the_latest_is_the_default(
        self, desk: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(desk)
        assert newest(Path("runs")).name == recorded.name

    def test_the_page_needs_nothing_but_itself(self, recorded: Path) -> None:
        text = page(Reading.open(recorded))
        loads = Loads()
        loads.feed(text)
        assert loads.open == []
        assert {"svg", "polyline", "rect", "table", "script", "style"} <= set(loads.seen)
        assert [address for address in loads.addresses if not address.startswith("data:")] == []
        assert "http://" not in text and "https://" not in text
        assert "@import" not in text and "url(" not in text

    def test_the_trace_is_what_perfetto_reads(self, recorded: Path, tmp_path: Path) -> None:
        target = tmp_path / "trace.json"
        html = str(tmp_path / "r.html")
        assert main(["report", str(recorded), "--html", html, "--trace", str(target)]) == 0
        rows = json.loads(target.read_text())["traceEvents"]
        spans = [row for row in rows if row["ph"] == "X"]
        assert {row["pid"] for row in spans} == {0, 1}
        assert {"compute", "exchange"} <= {row["cat"] for row in spans}
        assert all(row["dur"] >= 0 and row["ts"] >= 0 and row["name"] for row in spans)
        assert len(spans) == sum(event.kind != "note" for event in Reading.open(recorded).events)
        assert any(row["ph"] == "C" and row["args"].get("peak_bytes", 0) > 0 for row in rows)

    def test_forty_columns_of_ascii(self, copied: Path) -> None:
        env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0",
               "COLUMNS": "40", "TERM": "dumb"}  # fmt: skip
        done = terrazzo("report", str(copied), env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        lines = [line for line in done.stdout.splitlines() if not line.startswith(("page:", "/"))]
        assert max(map(len, lines)) <= 40
        assert "?" not in "".join(lines)
        assert "| device 0" in done.stdout

    def test_any_width(self, recorded: Path) -> None:
        reading = Reading.open(recorded)
        for width in (1, 20, 33, 61, 200):
            show(reading, Screen(io.StringIO(), width=width))

    def test_keys_are_not_torn_apart(self) -> None:
        written = io.StringIO()
        Screen(written, width=40).keys("● both curves", "x only 4 devices", "○ only one device")
        assert written.getvalue().splitlines() == [
            "● both curves   x only 4 devices", "○ only one device"
        ]  # fmt: skip

    @pytest.mark.parametrize("width", [40, 60, 100])
    def test_the_bars_of_the_demo_fit(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
        written = io.StringIO()
        with TrainingProgress(Screen(written, width=width), steps=80) as progress:
            for title in ("4 devices", "one device"):
                progress.training(title)(0, json.dumps({"step": 79, "loss": 12.3456}))
        assert "loss 12.3" in written.getvalue()
        assert "0:00:0" in written.getvalue()
        assert "…" not in written.getvalue()


class TestTrouble:
    def test_cut_off_in_the_middle_of_a_line(
        self, copied: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        events = copied / "events-1.jsonl"
        data = events.read_bytes()
        events.write_bytes(data[: len(data) * 6 // 10])
        (copied / "events-0.jsonl").write_bytes(b"\0" * 100 + data[:50])
        record = json.loads((copied / "run.json").read_text())
        (copied / "run.json").write_text(json.dumps({**record, "ended_s": None}))
        assert main(["report", str(copied)]) == 0
        assert "its end was not recorded" in capsys.readouterr().out
        reading = Reading.open(copied)
        assert not reading.losses
        assert reading.steps and not any(step.is_whole for step in reading.steps)
        assert "<svg" in (copied / "report.html").read_text()

    def test_nothing_was_recorded_yet(self, tmp_path: Path) -> None:
        RunFolder(tmp_path).write(Run.begin("train", ["python", "train.py"], 3))
        text = page(Reading.open(tmp_path))
        assert "3 devices" in text
        show(Reading.open(tmp_path), Screen(io.StringIO()))

    def test_filled_without_a_launcher(self, copied: Path) -> None:
        (copied / "run.json").unlink()
        reading = Reading.open(copied)
        assert reading.devices == 2
        assert "started without terrazzo run" in page(reading)

    def test_of_another_version(self, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
        record = json.loads((copied / "run.json").read_text())
        record["version"], record["machine"]["terrazzo"] = 9, "7.1"
        (copied / "run.json").write_text(json.dumps(record))
        assert main(["report", str(copied)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "recorded by Terrazzo 7.1 (run record version 9)" in err

    @pytest.mark.parametrize("damage", ["{", "[]", '{"terrazzo": "run", "version": 1}', "\0"])
    def test_damaged_records(self, damage: str, copied: Path) -> None:
        for name in ("run.json", "plan.json"):
            (copied / name).write_text(damage)
            assert main(["report", str(copied)]) == 2
            (copied / name).unlink()

    @pytest.mark.parametrize("name", ["gone", "empty", "file"])
    def test_no_run_folder(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        assert main(["report", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith("terrazzo: error: ")

    def test_a_page_that_cannot_be_written(
        self, copied: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["report", str(copied), "--html", "/proc/no/such/page.html"]) == 2
        assert "cannot write /proc/no/such/page.html" in capsys.readouterr().err

    def test_a_plan_of_another_model_is_left_out(self, copied: Path) -> None:
        plan = json.loads((copied / "plan.json").read_text())
        (copied / "plan.json").write_text(json.dumps({**plan, "graph": "another"}))
        assert "Plan: " not in page(Reading.open(copied))

    def test_names_are_escaped(self, copied: Path) -> None:
        record = json.loads((copied / "run.json").read_text())
        record["command"] = ["<script>alert(1)</script>", "&"]
        (copied / "run.json").write_text(json.dumps(record))
        text = page(Reading.open(copied))
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text


class TestInterrupted:
    def test_ctrl_c_leaves_a_readable_run(self, desk: Path, tmp_path: Path) -> None:
        folder = tmp_path / "cut"
        command = ["run", "--on", "2", "--run-dir", str(folder), str(desk / "train.py"), "9999"]
        process = subprocess.Popen(
            [sys.executable, "-m", "terrazzo.cli", *command], stderr=subprocess.PIPE, text=True
        )
        end_s = time.monotonic() + 60
        while not _grew(folder) and time.monotonic() < end_s and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
        assert process.returncode == 130
        assert f"recorded in {folder}" in err
        run = RunFolder(folder).read()
        assert run is not None and run.status == "interrupted"
        done = terrazzo("report", str(folder))
        assert done.returncode == 0, done.stderr
        assert "interrupted after" in done.stdout


def _grew(folder: Path) -> bool:
    files = [folder / f"events-{device}.jsonl" for device in range(2)]
    return all(file.exists() and file.stat().st_size > 3000 for file in files)


def test_reports_do_not_load_torch() -> None:
    code = "import sys, terrazzo.cli.main as m; m.parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

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

import numpy as np
import pytest
from PIL import Image

from terrazzo.cli.main import main
from terrazzo.demo.progress import TrainingProgress
from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.records.event import Event
from terrazzo.records.run import Run, RunFolder
from terrazzo.records.units import bytes_text, gap_text, seconds_text
from terrazzo.report import canvas, png
from terrazzo.report.page import page
from terrazzo.report.planview import PlanView
from terrazzo.report.plot import plot
from terrazzo.report.reading import Reading, newest
from terrazzo.report.screen import Screen
from terrazzo.report.steps import Step, steps_of
from terrazzo.report.svg import tag
from terrazzo.report.terminal import show
from terrazzo.report.ticks import ticks

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


class TestRunFolder:
    def test_never_overwrites(self, tmp_path: Path) -> None:
        names = {RunFolder.create(tmp_path, "My Net.v2").path.name for _ in range(3)}
        assert len(names) == 3
        assert all("-my-net-v2" in name for name in names)

    def test_a_named_folder_must_be_empty(self, recorded: Path) -> None:
        with pytest.raises(UsageError, match="is not empty"):
            RunFolder.take(recorded)

    @pytest.mark.parametrize("way", ["--run-dir", "runs"])
    def test_no_folder_can_be_made(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").write_text("a file where the folder should be")
        (tmp_path / "train.py").write_text("raise SystemExit('started')")
        extra = ["--run-dir", "runs/x"] if way == "--run-dir" else []
        assert main(["run", "--on", "2", *extra, "train.py"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "nothing can be recorded in runs" in err and "--no-record" in err

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """Files that may not grow stand in for a disk without room: the write itself fails."""
        (tmp_path / "train.py").write_text("raise SystemExit('started')")

        words = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "2", "train.py"]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "nothing can be recorded in runs/" in done.stderr

    def test_recording_can_be_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import os; print('TERRAZZO_RUN' in os.environ)")
        done = terrazzo("run", "--on", "1", "--no-record", "train.py", cwd=tmp_path)
        assert done.stdout == "device0 | False\n"
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]

    def test_a_script_without_terrazzo_leaves_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('hello')")
        done = terrazzo("run", "--on", "1", "train.py", cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("device0 | hello\n", "")
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]

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


def span(device: int, kind: str, name: str, begin_s: float, end_s: float) -> Event:
    return Event(device, 1, "forward", kind, name, begin_s, end_s)


class TestSteps:
    def test_who_comes_first_waits(self) -> None:
        early, late = span(0, "exchange", "g", 1.0, 5.0), span(1, "exchange", "g", 4.0, 5.0)
        step = Step(1, 2, (early, late), {})
        assert step.waiting_s == {early: 3.0, late: 0.0}
        assert step.split(0) == pytest.approx(
            {"compute": 0, "exchange": 1, "sum": 0, "agree": 0, "feed": 0, "waiting": 3, "other": 0}
        )

    def test_nobody_waits_longer_than_the_span_lasts(self) -> None:
        """One that never needed the late device was done before it came."""
        early, late = span(0, "exchange", "g", 1.0, 2.0), span(1, "exchange", "g", 9.0, 9.5)
        assert Step(1, 2, (early, late), {}).waiting_s[early] == 1.0

    def test_repeated_names_meet_in_order(self) -> None:
        spans = [span(d, "sum", "n", begin + d, begin + 3) for begin in (0.0, 10.0) for d in (0, 1)]
        waited = Step(1, 2, tuple(spans), {}).waiting_s
        assert [waited[one] for one in spans] == [1.0, 0.0, 1.0, 0.0]

    def test_a_missing_partner_means_no_waiting(self) -> None:
        assert Step(1, 2, (span(0, "sum", "n", 0.0, 3.0),), {}).waiting_s == {}

    def test_time_between_spans_is_the_rest(self) -> None:
        events = [span(0, "compute", "a", 0.0, 2.0), span(0, "compute", "b", 3.0, 4.0)]
        events.append(Event(0, 2, "forward", "compute", "a", 6.0, 7.0))
        first, second = steps_of(events, 1)
        assert first.split(0)["compute"] == 3.0
        assert first.split(0)["other"] == 3.0
        assert (first.seconds, second.seconds) == (6.0, 1.0)


class TestDrawing:
    def test_curves_that_meet_and_part(self) -> None:
        one = {1: 4.0, 2: 2.0, 3: 0.0}
        same = "\n".join(plot(one, one, width=40))
        assert "●" in same and "x" not in same and "○" not in same
        apart = "\n".join(plot(one, {1: 4.0, 2: 3.9, 3: 4.0}, width=40))
        assert {"●", "x", "○"} <= set(apart)

    def test_losses_that_are_no_numbers(self) -> None:
        rows = plot({1: math.nan, 2: 1.0, 3: math.inf}, {}, width=30)
        assert sum(row.count("x") for row in rows) == 1
        assert plot({1: math.nan}, {}, width=30) == []

    def test_uneven_tiles(self) -> None:
        tiles = (Box(((0, 1), (0, 3), (0, 40), (0, 10))), Box(((0, 1), (0, 3), (0, 40), (10, 40))))
        rows = canvas.tiles(PlanView(2, (1, 3, 40, 40), tiles, tiles, ()), width=41)
        assert rows[0] == "┌" + "─" * 9 + "┬" + "─" * 29 + "┐"
        assert "device 1" in rows[1] and "40x30" in rows[2]
        assert rows[-1][10] == "┴"

    def test_pictures_survive_png(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
        data = png.encode(pixels)
        assert np.array_equal(png.decode(data), pixels)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)

    @pytest.mark.parametrize("cut", [0, 4, 20, 60])
    def test_a_broken_png_is_refused(self, cut: int) -> None:
        data = png.encode(np.zeros((4, 4, 3), np.uint8))
        with pytest.raises(UsageError, match="no PNG of ours"):
            png.decode(data[:cut])

    def test_markup_is_escaped(self) -> None:
        assert tag("a", "<b>", tag("i", "&"), title='"') == (
            '<a title="&quot;">&lt;b&gt;<i>&amp;</i></a>'
        )


class TestWords:
    def test_units(self) -> None:
        assert [bytes_text(n) for n in (0, 999, 1023, 2048, 150 << 20)] == [
            "0 B", "999 B", "1.0 KiB", "2.0 KiB", "150 MiB"
        ]  # fmt: skip
        assert [seconds_text(s) for s in (0, 5e-5, 0.0123, 0.5, 2.5, 130)] == [
            "0 s", "50 µs", "12.3 ms", "500 ms", "2.50 s", "2 min 10 s"
        ]  # fmt: skip
        assert gap_text(0.0) == "0 (the same bits)"
        assert gap_text(math.nan) == "not a number"

    def test_ticks_are_round(self) -> None:
        assert ticks(0.0, 39.0, 4) == [0.0, 10.0, 20.0, 30.0]
        assert ticks(0.0, 0.0) == [0.0]
        assert ticks(math.nan, 1.0) == []

    @pytest.mark.parametrize("command", ["demo", "report"])
    def test_every_help_has_an_example(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"examples:\n  terrazzo {command}" in capsys.readouterr().out


def test_reports_do_not_load_torch() -> None:
    code = "import sys, terrazzo.cli.main as m; m.parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

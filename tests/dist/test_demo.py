"""The demo from its command line to its page, with few steps on small pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from terrazzo.cli.main import main
from terrazzo.demo.comparison import compare_weights
from terrazzo.demo.progress import TrainingProgress
from terrazzo.records.detections import Detections, Mark, Scene
from terrazzo.report.canvas import FOUND, drawn, half_blocks
from terrazzo.report.png import decode
from terrazzo.report.reading import Reading
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show

Terminal = tuple[TextIO, Callable[[], str]]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo of three steps in 40 columns of ASCII: its folder, and what it printed."""
    desk = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    words = ["demo", "--on", "2", "--steps", "3", "--size", "32", "--batch", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo.cli", *words],
        cwd=desk, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (desk / "runs").iterdir()
    return folder, done.stdout


def test_two_devices_give_the_numbers_of_one(demo: tuple[Path, str]) -> None:
    reading = Reading.open(demo[0])
    assert sorted(reading.loss_gaps) == [1, 2, 3]
    assert max(reading.loss_gaps.values()) <= 1e-10
    assert len(set(reading.losses.values())) == 3  # it did train
    summary = json.loads((demo[0] / "summary.json").read_text())
    assert summary["exact"] is True
    assert 0 <= summary["weights_gap"] <= 1e-10


def test_every_record_is_there(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    names = {path.name for path in folder.iterdir()}
    assert {"run.json", "plan.json", "graph.json", "events-0.jsonl", "events-1.jsonl",
            "summary.json", "comparison.json", "detections.json", "report.html",
            "alone", "weights.safetensors"} <= names  # fmt: skip
    reading = Reading.open(folder)
    assert reading.alone is not None
    for part in (reading, reading.alone):
        assert part.run is not None and part.run.status == "done"
        for memory in part.memory:
            assert 0 < memory.idle_bytes <= memory.ready_bytes < memory.peak_bytes * 1.01
    weights = sum(tensor.nbytes for tensor in load_file(folder / "weights.safetensors").values())
    for sent in reading.sent_bytes.values():
        # All weight gradients are summed, and some statistics; edges and pictures are sent.
        assert 0.9 * weights < sent["sum"] < 1.2 * weights
        assert sent["exchange"] > 0


def test_what_it_prints(demo: tuple[Path, str]) -> None:
    text = demo[1]
    assert text.isascii()
    drawing = [line for line in text.splitlines() if "runs/" not in line]
    assert max(map(len, drawing)) <= 40
    for words in ("2 devices: step 3 of 3", "one device: step 3 of 3", "| device 0",
                  "* both curves", "Memory per device", "largest relative gap",
                  "2 devices gave the numbers of one", "report.html"):  # fmt: skip
        assert words in text


def test_its_page(demo: tuple[Path, str]) -> None:
    text = (demo[0] / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 7  # six scenes, and the plan over the first
    for title in ("both curves lie on each other", "Plan: ", "Memory per device", "Timeline",
                  "Where the time goes", "Bytes sent per step", "Detections"):  # fmt: skip
        assert title in text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal with colours: what to write to, and what appeared on it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def drain() -> None:
        with suppress(OSError):  # what a terminal says when the other side is closed
            while True:
                shown.append(os.read(ours, 65536))

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    file = open(theirs, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (closed when it is read)

    def appeared() -> str:
        file.close()
        reader.join(timeout=20)
        return b"".join(shown).decode()

    yield file, appeared
    appeared()
    os.close(ours)


def test_pictures_in_a_terminal_with_colours(demo: tuple[Path, str], terminal: Terminal) -> None:
    file, appeared = terminal
    show(Reading.open(demo[0]), Screen(file, width=100))
    assert appeared().count("▀") > 500


def test_bars_that_move(terminal: Terminal) -> None:
    file, appeared = terminal
    with TrainingProgress(Screen(file, width=40), steps=2) as progress:
        heard = progress.training("2 devices")
        heard(1, '{"step": 1, "loss": 99.0}')
        heard(0, "a warning of some library")
        heard(0, '{"step": 2, "loss": 7.5}')
    text = appeared()
    assert "loss 7.5" in text and "99" not in text


def test_boxes_are_drawn_where_they_are(demo: tuple[Path, str]) -> None:
    found = Detections.from_json((demo[0] / "detections.json").read_text())
    pixels = decode((demo[0] / found.scenes[0].picture).read_bytes())
    assert pixels.shape == (32, 32, 3)
    scene = Scene("", (Mark("disc", 0.9, 0.25, 0.5, 0.75, 1.2),), ())
    small = drawn(np.zeros_like(pixels), scene, width=16)
    frame = (small == FOUND).all(-1)
    assert frame[8, 4:13].all() and frame[8:, 4].all() and frame[15, 4:13].all()
    assert not frame[:8].any() and not frame[9:15, 5:12].any()
    assert len(half_blocks([small])) == 8


def test_weights_that_differ_are_found(demo: tuple[Path, str], tmp_path: Path) -> None:
    path = demo[0] / "weights.safetensors"
    weights = load_file(path)
    name = next(name for name, tensor in weights.items() if tensor.ndim == 4)
    weights[name] = weights[name] * (1 + 1e-7)
    save_file(weights, tmp_path / "w.safetensors")
    report = compare_weights(tmp_path / "w.safetensors", path)
    assert not report.ok
    assert report.weights_where == name
    weights[name] = weights[name] * np.nan
    save_file(weights, tmp_path / "w.safetensors")
    assert not compare_weights(tmp_path / "w.safetensors", path).ok


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "50"], "--size 50 does not fit the network"),
        (["--steps", "0"], "--steps 0 is too few"),
        (["--on", "6xpi3"], "--on 6xpi3 is not supported"),
        (["--run-dir", "/proc/no/such"], "nothing can be recorded in /proc/no/such"),
    ],
)
def test_refused_before_anything_starts(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1

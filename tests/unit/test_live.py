"""The board of a run: what it reads from records that grow, and what it shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from terrazzo.cluster.board import Board
from terrazzo.records.event import Event
from terrazzo.report.live import LiveRun


def span(call: int, kind: str, begin_s: float, end_s: float, phase: str = "forward") -> str:
    return Event(0, call, phase, kind, "x", begin_s, end_s).to_line() + "\n"


def note(name: str, **values: float) -> str:
    return Event(0, 1, "forward", "note", name, 0, 0, 0, tuple(values.items())).to_line() + "\n"


def shown(run: LiveRun) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(run.table())
    return console.export_text()


def test_steps_are_read_as_they_are_finished(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    run = LiveRun(tmp_path, ["pi1", "pi2"])
    run.update()
    assert run.devices[0].step == 0
    with path.open("w") as file:
        file.write(span(1, "compute", 10.0, 10.3) + span(1, "sum", 10.3, 10.4))
        file.write(
            note("log", step=1.0, loss=0.25) + "not an event\n" + note("memory", peak_bytes=5e8)
        )
        file.write(span(2, "compute", 10.5, 10.9) + '[0, 2, "backw')
    run.update()
    device = run.devices[0]
    assert (device.step, round(device.step_s or 0, 6)) == (1, 0.5)
    assert {kind: round(s, 6) for kind, s in device.split_s.items()} == {"compute": 0.3, "sum": 0.1}
    assert run.loss == "loss 0.25"
    with path.open("a") as file:
        file.write('ard", "compute", "x", 10.9, 11.0, 0]\n' + span(22, "compute", 20.5, 20.6))
    run.update()
    assert (device.step, round(device.step_s or 0, 6)) == (2, 0.5), "one call in twenty is recorded"
    text = shown(run)
    assert "compute 100%" in text
    assert "477 MiB" in text


def test_numbers_are_those_of_who_is_left_and_a_lost_device_is_shown_as_lost(
    tmp_path: Path,
) -> None:
    run = LiveRun(tmp_path, ["pi1", "pi2"])
    for device, calls in enumerate((3, 5)):
        told = [span(call, "compute", call, call + 0.5) for call in range(1, calls + 1)]
        log = note("log", step=float(calls), loss=1.0 / calls)
        (tmp_path / f"events-{device}.jsonl").write_text("".join(told) + log)
    run.update()
    run.devices[0].is_lost = True
    assert run.loss == "loss 0.2"
    rows = {line.split()[0]: line for line in shown(run).splitlines() if "pi" in line}
    assert "lost" in rows["pi1"] and "compute" not in rows["pi1"]
    assert "lost" not in rows["pi2"] and "compute 100%" in rows["pi2"]


def test_heat_and_throttling_are_shown(tmp_path: Path) -> None:
    vitals = {"temperature_c": 84.6, "throttled": True, "resident_bytes": 3 << 20}
    (tmp_path / "vitals-1.jsonl").write_text("{}\n" + json.dumps(vitals) + "\n")
    run = LiveRun(tmp_path, ["pi1", "pi2"])
    run.update()
    row = next(line for line in shown(run).splitlines() if "pi2" in line)
    assert "85 °C THROTTLED" in row
    assert "3.0 MiB" in row


def test_lines_scroll_above_and_are_kept(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, highlight=False)
    (tmp_path / "events-0.jsonl").write_text(span(1, "compute", 0, 1) + span(2, "compute", 2, 3))
    with Board(["pi1", "pi2"], tmp_path, console=console) as board:
        board.line(1, "a line \x1b[31mof\x1b[0m its own")
        board.line(0, "trouble", is_error=True)
        board.notice("said by the launcher")
    text = out.getvalue()
    assert "pi2 | " in text
    assert "said by the launcher" in text
    assert "where its time goes" in text
    assert (tmp_path / "log-0.txt").read_text() == "trouble\n"
    assert "of" in (tmp_path / "log-1.txt").read_text()

"""A race from the command line, on plain processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_race_on_loopback(tmp_path: Path) -> None:
    words = "race --on 2xpi3 --unshaped --model darknet-small --batch 2 --size 32 --rounds 1"
    chosen = "--seconds 0.1 --peers alone,ddp,each --save out"
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo.cli", "bench", *words.split(), *chosen.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT emulated" in done.stderr
    body = json.loads((tmp_path / "out" / "race.json").read_text())
    (held,) = body["races"]
    rows = {row["peer"]: row for row in held["rows"]}
    assert {name: row["problem"] for name, row in rows.items()} == dict.fromkeys(rows, "")
    assert not held["emulated"]
    assert held["baseline"] == "alone"
    assert rows["each"]["exact"], rows["each"]["gap"]
    assert rows["alone"]["exact"]
    assert not rows["ddp"]["exact"], "each replica's BatchNorm sees its own image only"
    assert len(rows["each"]["peak_bytes"]) == 2
    assert len(rows["alone"]["peak_bytes"]) == 1
    assert all(row["most_own_bytes"] > 0 for row in rows.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["race.html", "race.json"]
    assert "speedup over alone" in done.stdout


@pytest.mark.timeout(60)
def test_nonsense_is_refused_before_anything_starts(tmp_path: Path) -> None:
    base = [sys.executable, "-m", "terrazzo.cli", "bench", "race", "--on", "2"]
    for words, complaint in (
        ("--model lenet", "no model 'lenet'"),
        ("--model resnet18 --peers alone,horovod", "no peer 'horovod'"),
        ("--model resnet18 --batch 0", "--batch 0"),
    ):
        done = subprocess.run([*base, *words.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert complaint in done.stderr
        assert not (tmp_path / "runs").exists()

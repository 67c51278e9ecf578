"""A race from the command line, on plain processes of this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz


def held(folder: Path, words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """A race of two devices without the lab, and what it recorded."""
    usual = "race --on 2xpi3 --unshaped --rounds 1 --seconds 0.1 --save out"
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo.cli", "bench", *usual.split(), *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads((folder / "out" / "race.json").read_text())
    (race,) = body["races"]
    return race, done


def by_peer(race: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in race["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_race_on_loopback(tmp_path: Path) -> None:
    race, done = held(tmp_path, "--model darknet-small --batch 2 --size 32 --peers accumulate,each")
    assert "NOT emulated" in done.stderr
    rows = by_peer(race)
    assert {name: row["problem"] for name, row in rows.items()} == dict.fromkeys(rows, "")
    assert not race["emulated"]
    assert race["baseline"] == "accumulate"
    assert rows["each"]["exact"], rows["each"]["gap"]
    assert not rows["accumulate"]["exact"], "BatchNorm saw one image at a time"
    assert len(rows["each"]["peak_bytes"]) == 2
    assert len(rows["accumulate"]["peak_bytes"]) == 1
    assert all(row["most_own_bytes"] > 0 for row in rows.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["race.html", "race.json"]
    assert "speedup over accumulate" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchs_own_ways_and_a_plan_from_what_is_measured(tmp_path: Path) -> None:
    """Without BatchNorm, spreading three images over two devices must give the same gradients."""
    words = "--model vgg --batch 3 --size 32 --minutes 0.3 --peers ddp,fsdp2,auto"
    rows = by_peer(held(tmp_path, f"{words} --terrazzo 'auto one'")[0])
    assert set(rows) == {"ddp", "fsdp2", "auto", "terrazzo auto one"}
    for name, row in rows.items():
        assert row["problem"] == ""
        assert row["exact"], f"{name}: {row['gap']}"
    planned = rows["auto"]
    assert planned["predicted_s"] > 0
    assert len(planned["predicted_bytes"]) == 2
    assert "predicted" in planned["choice"]
    chosen, fused = (
        tz.Plan.load(tmp_path / "out" / f"plan-vgg-32-3-on-2xpi3{kind}.json")
        for kind in ("", "-one")
    )
    layouts = [str(group.layout) for group in chosen.groups]
    assert [str(group.layout) for group in fused.groups] == [name for name, _ in groupby(layouts)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_cuts_a_model_whose_branches_pass_by_a_stage(tmp_path: Path) -> None:
    race, _ = held(tmp_path, "--model unet32 --batch 1 --size 64 --peers pipeline")
    row = by_peer(race)["pipeline"]
    assert row["problem"] == ""
    assert row["exact"], row["gap"]
    assert row["steps"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_of_one_microbatch_is_plain(tmp_path: Path) -> None:
    race, done = held(tmp_path, "--model yolov2-front --batch 1 --size 32 --peers ddp,pipeline")
    rows = by_peer(race)
    assert rows["pipeline"]["exact"], rows["pipeline"]
    assert "1 of at least 2 images" in rows["ddp"]["problem"]
    assert "ddp is not in the race, and not beaten" in done.stdout
    assert race["baseline"] is None

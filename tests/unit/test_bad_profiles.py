"""Profiles and presets that nothing can be planned with: one line that says what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.graph.export import export
from terrazzo.lab import load_presets
from terrazzo.records.machine import Machine
from terrazzo.records.profile import Profile

sys.path.insert(0, str(Path(__file__).parent))
from clusters import profile

Change = Callable[[dict[str, Any]], None]
ABSURD = (-1.0, float("nan"), float("inf"), 1e30, "94", None)
PLACES: dict[str, Change] = {
    "sending of d1": lambda body: body["network"]["links"][1].update(up_bytes_per_s=VALUE[0]),
    "receiving of d0": lambda body: body["network"]["links"][0].update(down_bytes_per_s=VALUE[0]),
    "the latency of d1": lambda body: body["network"]["links"][1].update(latency_s=VALUE[0]),
    "what all can send": lambda body: body["network"].update(together_bytes_per_s=VALUE[0]),
    "memory of d0": lambda body: body["devices"][0].update(memory_bytes=VALUE[0]),
    "copying of d0": lambda body: body["devices"][0].update(copy_bytes_per_s=VALUE[0]),
    "the time of": lambda body: body["devices"][0]["timings"][0].update(forward_s=VALUE[0]),
}
VALUE: list[Any] = [0.0]


def changed(change: Change) -> str:
    body = json.loads(profile(2).to_json())
    change(body)
    return json.dumps(body)


class TestFigures:
    @pytest.mark.parametrize("where", PLACES)
    def test_what_nothing_can_have_is_refused(self, where: str) -> None:
        for absurd in ABSURD:
            VALUE[0] = absurd
            if where == "the time of" and absurd is None:
                continue  # not measured
            with pytest.raises(UsageError, match=f"{where}.* possible: measure again"):
                Profile.from_json(changed(PLACES[where]))

    def test_a_link_that_carries_nothing(self) -> None:
        VALUE[0] = 0.0
        with pytest.raises(UsageError, match=r"sending of d1 is 0\.0; between 100 and 1e\+13"):
            Profile.from_json(changed(PLACES["sending of d1"]))

    def test_links_and_devices_belong_together(self) -> None:
        with pytest.raises(UsageError, match="of 2 devices and 1 links"):
            Profile.from_json(changed(lambda body: body["network"]["links"].pop()))
        with pytest.raises(UsageError, match="of 2 devices and 0 links"):
            Profile.from_json(changed(lambda body: body.update(network=None)))
        with pytest.raises(UsageError, match="names no device"):
            Profile.from_json(changed(lambda body: body.update(devices=[])))

    def test_what_was_measured_passes(self) -> None:
        assert Profile.from_json(profile(3).to_json()) == profile(3)

    @pytest.mark.parametrize("absurd", ["-1", "0", "nan", "inf", "1e30", '"94"'])
    def test_presets_say_what_is_possible(self, tmp_path: Path, absurd: str) -> None:
        path = tmp_path / "boards.toml"
        for key, line in (
            ("mbit", f"gflops = 5\nmemory_mib = 900\nwire = {{ mbit = {absurd} }}"),
            ("gflops", f"gflops = {absurd}\nmemory_mib = 900\nwire = {{ mbit = 94 }}"),
            ("memory_mib", f"gflops = 5\nmemory_mib = {absurd}\nwire = {{ mbit = 94 }}"),
        ):
            path.write_text(f"[odd]\nthreads = 4\n{line}\n")
            with pytest.raises(UsageError, match=f"has {key} = .*; (it must be|possible is)"):
                load_presets([path])


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))


X = torch.zeros(2, 3, 16, 16)


def measured(**key: str) -> Profile:
    here = {"model": export(model(), (X,)).graph.digest, "torch": Machine.here().torch}
    known = profile(2)
    return replace(known, key={**known.key, **here, **key})


class TestOfSomethingElse:
    def test_a_profile_of_this_model_and_torch_is_taken(self) -> None:
        assert tz.plan(model(), (X,), devices=2, profile=measured()).devices == 2

    def test_of_another_model_or_input(self) -> None:
        with pytest.raises(UsageError, match="the profile is of model other, this one"):
            tz.plan(model(), (X,), devices=2, profile=measured(model="other"))
        with pytest.raises(UsageError, match="or its input shape"):
            tz.plan(model(), (torch.zeros(2, 3, 24, 16),), devices=2, profile=measured())

    def test_of_another_torch(self, tmp_path: Path) -> None:
        path = tmp_path / "old.json"
        measured(torch="1.0").save(path)
        with pytest.raises(UsageError, match=r"is of torch 1\.0, here is .*: measure this one"):
            tz.plan(model(), (X,), devices=2, profile=path)

    def test_a_dry_run_may_be_for_devices_with_another_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "net.py").write_text(
            "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3, "
            "padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))\n"
        )
        asked = ["plan", f"{tmp_path / 'net.py'}:build", "--on", "2", "--profile"]
        path = tmp_path / "profile.json"
        measured(torch="1.0").save(path)
        assert main([*asked, str(path), "--input", "2x3x16x16"]) == 0
        capsys.readouterr()
        assert main([*asked, str(path), "--input", "4x3x16x16"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "the profile is of model" in told

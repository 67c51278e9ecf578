"""``--on``: what it names, and what happens where nothing can be emulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.cli import place
from terrazzo.cli.main import main
from terrazzo.cluster import LocalHosts

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import os; print(os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])")
    return str(path)


def test_unshaped_runs_and_says_what_is_missing(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "2xpi3", "--unshaped", "--no-record", script]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["device0 | 2 127.0.0.1", "device1 | 2 127.0.0.1"]
    assert "--unshaped: 2 devices of 2xpi3 run as local processes" in err
    assert "NOT emulated: compute rate, link rate, delay, memory limit" in err


def test_without_root_it_still_runs(
    script: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "is_root", lambda: False)
    assert main(["run", "--on", "1xpi3,1xpi4", "--no-record", script]) == 0
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 2
    assert "without root (use sudo to emulate)" in err
    assert "NOT emulated" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cluster.toml", "no file cluster.toml: write one (docs/clusters.md), or let terrazzo"),
        ("-3", "--on -3 is not understood"),
        ("0", "--on 0 is not understood"),
        ("2xnone", "no preset none"),
        ("2xpi3:", "'2xpi3:' is not understood"),
    ],
)
def test_refused(script: str, capfd: pytest.CaptureFixture[str], text: str, says: str) -> None:
    assert main(["run", f"--on={text}", script]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_numbers_are_local_processes(script: str) -> None:
    options = place.argparse.Namespace(on="3")
    found = place.Place.read(options)
    with found.open() as hosts:
        assert hosts == LocalHosts(3)
    assert found.devices == 3


def test_show_names_presets_and_labs(capfd: pytest.CaptureFixture[str], script: str) -> None:
    assert main(["lab", "show"]) == 0
    out = capfd.readouterr().out
    assert all(name in out for name in ("pi3", "pi4", "pi5", "zero2", "laptop"))

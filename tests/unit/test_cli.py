"""The command line: help that teaches, and one clear line for what it cannot do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from terrazzo.cli import check
from terrazzo.cli.check_job import CheckJob
from terrazzo.cli.main import main
from terrazzo.cli.model import ModelReference
from terrazzo.cli.tensor import TensorSpec
from terrazzo.errors import ModelError, UsageError
from terrazzo.records import Plan
from terrazzo.records.check import CheckReport, CheckRow

pytestmark = pytest.mark.timeout(120)

MODELS = """
from torch import nn

ready = nn.Conv2d(3, 4, 3)
number = 7

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3))

def build():
    return Net()

def broken():
    raise RuntimeError("no weights\\nanywhere")

def picture():
    return "a picture"
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "terrazzo_checked_model", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line the command line says about arguments it must not accept."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("terrazzo: error: ")
    assert err.count("\n") == 1
    return err


class TestHelp:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["--version"])
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith("terrazzo 0.")

    @pytest.mark.parametrize("command", [[], ["run"], ["check"]])
    def test_every_help_has_an_example(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0
        assert "examples:\n  terrazzo " in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [[], ["dance"], ["check", "a:b"], ["plan", "a:b"]])
    def test_incomplete_commands(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert "usage: terrazzo" in capsys.readouterr().err


class TestPlan:
    MODEL = ("plan", "terrazzo.zoo.unet:unet", "--input", "1x3x256x256")

    def test_memory_of_a_step_and_a_plan_to_keep(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "plan.json"
        assert main([*self.MODEL, "--on", "2", "--save", str(path)]) == 0
        out = capsys.readouterr().out
        assert "device 1" in out
        assert "Memory of a training step" in out
        assert "weights 29.6 MiB" in out
        assert "passes" not in out
        assert Plan.load(path).devices == 2

    def test_a_limit_and_its_cost(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.MODEL, "--memory", "190MiB"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "limit 190MiB" in out
        assert "times the arithmetic" in out

    def test_a_limit_nothing_can_meet(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = refused(capsys, *self.MODEL, "--memory", "20MiB")
        assert "limit 20.0 MiB" in line
        assert 'Try memory="' in line


class TestRun:
    def test_runs_the_script_with_its_arguments(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
        assert main(["run", "--on", "2", str(script), "--on", "9", "fast"]) == 0
        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == ["device0 | 0 --on 9 fast", "device1 | 1 --on 9 fast"]

    def test_fails_as_the_first_device_does(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text("import os, sys; sys.exit(6 * (os.environ['RANK'] == '1'))")
        assert main(["run", "--on", "2", str(script)]) == 6
        assert "terrazzo: error: device1 failed with exit status 6" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("words", "seen"),
        [
            (["{script}", "--on", "2"], ""),
            (["{script}", "--on=2", "--epochs", "5"], "--epochs 5"),
            (["--on", "2", "{script}", "--grace", "x"], "--grace x"),
            (["--on=2", "{script}", "--help"], "--help"),
        ],
    )
    def test_on_may_follow_the_script_directly(
        self, words: list[str], seen: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text("import sys; print('got', *sys.argv[1:])")
        given = [word.format(script=script) for word in words]
        assert main(["run", "--no-record", *given]) == 0
        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == [f"device{n} | got {seen}".rstrip() for n in range(2)]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ([], "on how many devices? Such as: terrazzo run --on 2 train.py"),
            (["--lr", "1"], "Such as: terrazzo run --on 2 train.py --lr 1"),
            (["--on"], "Such as: terrazzo run --on 2 train.py"),
            (["--lr", "a b", "--on", "3"], "put it first: terrazzo run --on 3 train.py --lr 'a b'"),
            (
                ["--on=3", "--grace", "5"],
                "terrazzo run --on 3 train.py --grace 5 (with --grace before train.py, if meant",
            ),
        ],
    )
    def test_or_the_right_command_is_named(
        self, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert says in refused(capsys, "run", "train.py", *words)

    def test_missing_script(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no script gone.py" in refused(capsys, "run", "--on", "2", "gone.py")

    def test_places_of_later_versions(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no file cluster.toml" in refused(capsys, "run", "--on", "cluster.toml", "train.py")

    def test_negative_grace(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = refused(capsys, "run", "--on", "2", "--grace", "-1", __file__)
        assert "--grace -1 is negative" in text

    def test_ctrl_c_ends_with_130_and_no_traceback(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            "import os, pathlib, time\n"
            "pathlib.Path('up' + os.environ['RANK']).touch()\n"
            "time.sleep(60)"
        )
        command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", "2", script.name]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        end_s = time.monotonic() + 40
        while len(list(tmp_path.glob("up?"))) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out == ""
        assert err.splitlines() == [
            "terrazzo | Ctrl-C: stopping device0, device1",
            "terrazzo: stopped by Ctrl-C; nothing was recorded yet",
        ]


class TestCheckRefusals:
    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"model": "nets.py"}, "names no callable; write FILE.py:CALLABLE"),
            ({"model": "resnet"}, "no model 'resnet' in the zoo; there are convnext"),
            ({"model": "gone.py:build"}, "there is no file gone.py"),
            ({"model": "nets.py:a b"}, "'a b' is no Python name"),
            ({"--input": "2x3xx4"}, "--input 2x3xx4 is no shape"),
            ({"--input": "2x0x4"}, "has a size of 0"),
            ({"--input": "2x3:float16"}, "type 'float16' is not one of float64"),
            ({"--on": "many"}, "--on many is not understood"),
            ({"--layout": "tiles:2x2"}, "is for 4 devices, --on says 2; make them agree"),
            ({"--layout": "rings"}, "layout 'rings' is not understood"),
            ({"--tolerance": "0"}, "--tolerance 0 must be above 0"),
            ({"--tolerance": "nan"}, "--tolerance nan must be above 0"),
        ],
    )
    def test_before_any_process_starts(
        self,
        changed: dict[str, str],
        says: str,
        models: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        given = {"model": "nets.py:build", "--input": "2x3x8x8", "--on": "2", **changed}
        model = given.pop("model")
        flags = [word for pair in given.items() for word in pair]
        assert says in refused(capsys, "check", model, *flags)

    def test_by_the_devices(self, models: Path) -> None:
        """A model that only fails when built is refused in one line too, not in two tracebacks."""
        command = ["check", "nets.py:broken", "--input", "2x3x8x8", "--on", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "terrazzo.cli", *command],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == [
            "terrazzo: error: model nets.py:broken: calling broken() raised RuntimeError: "
            "no weights anywhere; it must work without arguments"
        ]


class TestModelReference:
    @pytest.mark.parametrize("name", ["build", "Net", "ready"])
    def test_function_class_and_instance(self, name: str, models: Path) -> None:
        assert isinstance(ModelReference.parse(f"nets.py:{name}").build(), nn.Module)

    def test_module(self) -> None:
        model = ModelReference("torch.nn", "Identity").build()
        assert isinstance(model, nn.Identity)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("nets.py:bild", "nets.py has no bild; it has Net, broken, build, picture"),
            ("nets.py:number", "number is a int; it must be an nn.Module or a function"),
            ("nets.py:picture", r"picture\(\) returned a str; it must return an nn.Module"),
            ("nets.py:broken", "raised RuntimeError: no weights anywhere"),
            ("no_such_package.nets:build", "there is no module no_such_package"),
            ("torch.no_such_part:build", "there is no module torch.no_such_part"),
        ],
    )
    def test_what_is_wrong_is_named(self, text: str, says: str, models: Path) -> None:
        with pytest.raises(ModelError, match=says):
            ModelReference.parse(text).build()

    def test_a_file_that_cannot_be_imported(self, models: Path) -> None:
        (models / "bad.py").write_text("import no_such_neighbour")
        with pytest.raises(ModelError, match=r"importing bad\.py raised ModuleNotFoundError"):
            ModelReference.parse("bad.py:build").build()

    def test_a_file_may_import_its_neighbours(self, models: Path) -> None:
        (models / "sizes.py").write_text("WIDTH = 5")
        (models / "far.py").write_text(
            "from torch import nn\nfrom sizes import WIDTH\nbuild = lambda: nn.Linear(WIDTH, 1)"
        )
        assert ModelReference.parse("far.py:build").build().in_features == 5


class TestTensorSpec:
    def test_draws_the_same_twice(self) -> None:
        spec = TensorSpec.parse("2x3x8x9")
        first, second = (spec.draw(torch.Generator().manual_seed(1)) for _ in range(2))
        assert first.shape == (2, 3, 8, 9)
        assert first.dtype == torch.float64
        assert torch.equal(first, second)

    @pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
    def test_other_types(self, dtype: str) -> None:
        spec = TensorSpec.parse(f"100:{dtype}")
        drawn = spec.draw(torch.Generator().manual_seed(1))
        assert drawn.dtype == getattr(torch, dtype)
        assert 0 <= drawn.min() < drawn.max() <= 9
        assert TensorSpec.parse(str(spec)) == spec

    def test_refuses_words(self) -> None:
        with pytest.raises(UsageError, match="is no shape"):
            TensorSpec.parse("image")


class TestCheckReport:
    def test_the_table_names_what_is_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = CheckJob(
            model="nets.py:build",
            inputs=("2x3x8x8",),
            layout=None,
            groups=None,
            training=True,
            seed=0,
            tolerance=1e-10,
        )
        job.write(tmp_path)
        assert CheckJob.read(tmp_path) == job
        report = CheckReport(
            rows=(
                CheckRow("outputs", 2e-15, "output 0", 1, 1e-10),
                CheckRow("parameter gradients", 3e-4, "conv.weight [h]", 12, 1e-10),
            ),
            split_flops=0.987,
            split_bytes=0.5,
            devices=3,
            plan_text="a plan [not markup]",
        )
        check.show(report, job=job)
        text = capsys.readouterr().out
        for part in ("a plan [not markup]", "2.0e-15", "conv.weight [h]", "98.7% of FLOPs"):
            assert part in text
        assert "NOT exact on 3 devices: parameter gradients" in text


def test_the_launcher_does_not_load_torch() -> None:
    """Starting devices is quick and takes little memory beside them."""
    code = "import sys, terrazzo.cluster; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "False\n"

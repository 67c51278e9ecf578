"""The examples alone and on several devices, with the same weights."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from plain import assert_close
from safetensors.torch import load_file
from script import Script, meeting, together

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = 3

TINY = {
    "classify": "--epochs 2 --count 20 --batch 4 --size 32 --enough 2".split(),
    "segment": "--epochs 2 --count 20 --batch 4 --size 32 --up bilinear".split(),
    "detect": (
        "--epochs 2 --frozen 1 --count 20 --batch 4 --sizes 32 64 --every 1 --warm-up 4 "
        "--pretraining 1"
    ).split(),
}


class Job:
    """One run of one example in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.out = folder, folder / "weights.safetensors"
        self.backbone = folder / "backbone.safetensors"
        arguments = [f"--out={self.out}", f"--data={folder / 'data'}", "--double", *TINY[name]]
        if name == "detect":
            arguments.append(f"--backbone={self.backbone}")
        self.script, self.arguments = EXAMPLES / f"{name}.py", arguments
        self.lines: list[str] = []

    def alone(self) -> None:
        self.lines = Script(self.script, self.arguments, folder=self.folder).finish().splitlines()

    def together(self) -> None:
        texts = together(self.script, self.arguments, folder=self.folder, devices=DEVICES)
        self.lines = [line for text in texts for line in text.splitlines()]

    def mixed(self) -> None:
        """On two devices, of which the last rounds differently: its torch must load to do so."""
        own, other = meeting(2)
        first = Script(self.script, self.arguments, folder=self.folder, environment=own)
        last = subprocess.run(
            [sys.executable, str(self.script), *self.arguments],
            cwd=self.folder,
            env={**os.environ, **other, "ATEN_CPU_CAPABILITY": "default"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        self.lines = first.finish().splitlines()
        assert last.returncode == 0, last.stdout

    def epochs(self) -> list[str]:
        """What it said of its epochs, to the digits printed, without the device's name."""
        return [line[line.index("epoch ") :] for line in self.lines if "epoch " in line]


def compare(alone: Job, together: Job, *, epochs: int) -> None:
    assert len(alone.epochs()) == epochs, "\n".join(alone.lines)
    assert len(set(alone.epochs())) == epochs, "nothing was learnt from epoch to epoch"
    assert together.epochs() == alone.epochs()
    assert_close(load_file(together.out), load_file(alone.out))
    left = {path.name for path in together.folder.iterdir() if path.name.startswith(".")}
    assert not left, "a file was left half-written"


@pytest.mark.parametrize("name", ["classify", "segment"])
def test_example_gives_the_same_weights_on_three_devices(name: str, tmp_path: Path) -> None:
    alone, together = Job(name, tmp_path / "alone"), Job(name, tmp_path / "together")
    alone.alone()
    together.together()
    compare(alone, together, epochs=2)


def test_detector_on_mixed_devices_gives_the_same_weights(tmp_path: Path) -> None:
    """Pre-training, frozen and unfrozen epochs, two sizes, averages and decisions in between."""
    alone, together = Job("detect", tmp_path / "alone"), Job("detect", tmp_path / "together")
    alone.alone()
    together.mixed()
    compare(alone, together, epochs=3)
    pretrained, trained = load_file(together.backbone), load_file(together.out)
    assert_close(pretrained, load_file(alone.backbone))
    first_layer = "backbone.fine.0.0.weight"
    assert not torch.equal(trained[first_layer], pretrained[first_layer]), "it stayed frozen"


# ---- what the detector does to its pictures ----------------------------------------------


@pytest.fixture(scope="module")
def detect() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detect", EXAMPLES / "detect.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_boxes_follow_a_mirrored_picture(detect: ModuleType) -> None:
    torch.manual_seed(0)
    picture = torch.full((3, 20, 40), 60, dtype=torch.uint8)
    picture[:, 4:8, 6:14] = 200
    boxes = torch.tensor([[1, 10 / 40, 6 / 20, 8 / 40, 4 / 20], [-1, 0, 0, 0, 0]])
    seen, colours = set(), set()
    for _ in range(40):
        found, (box, none) = detect.augment(picture, boxes)
        bright = found[0] > found[0].float().mean()
        columns, rows = bright.any(0).nonzero(), bright.any(1).nonzero()
        assert (int(rows[0]), int(rows[-1])) == (4, 7)
        assert float(box[1]) * 40 == pytest.approx((int(columns[0]) + int(columns[-1]) + 1) / 2)
        assert box[[0, 2, 3, 4]].tolist() == boxes[0, [0, 2, 3, 4]].tolist()
        assert none.tolist() == [-1, 0, 0, 0, 0]
        seen.add(int(columns[0]))
        colours.add(int(found[1, 0, 0]))
    assert seen == {6, 26}, "both sides must occur"
    assert len(colours) > 10


def test_batches_change_size_every_few_steps(detect: ModuleType) -> None:
    loader = [(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, 1, 5))] * 3
    mixed = detect.MultiScale(loader, [16, 32, 48], 2)
    sizes = [x.shape[-1] for _ in range(3) for x, _ in mixed]
    assert sizes == [16, 16, 32, 32, 48, 48, 16, 16, 32]
    assert {x.dtype for x, _ in mixed} == {torch.uint8}


def test_a_batch_has_the_rows_its_fullest_picture_needs(detect: ModuleType) -> None:
    picture, boxes = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((6, 5), -1.0)
    boxes[:2, 0] = 1
    fuller = boxes.clone()
    fuller[2, 0] = 0
    _, rows = detect.collate([(picture, boxes), (picture, fuller)])
    assert rows.shape == (2, 3, 5)
    assert torch.equal(rows[1], fuller[:3])

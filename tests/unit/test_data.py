"""Synthetic sets: the same bits each time, whole or absent, and labels that fit the pictures."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from torch.utils.data import DataLoader

from terrazzo.errors import UsageError
from terrazzo.zoo.data import (
    CLASSES,
    ClassificationSet,
    DetectionSet,
    SegmentationSet,
    codec,
    make_classification,
    make_detection,
    make_segmentation,
    store,
)
from terrazzo.zoo.data.paint import paint

MAKERS = {
    "classification": (make_classification, ClassificationSet),
    "detection": (make_detection, DetectionSet),
    "segmentation": (make_segmentation, SegmentationSet),
}


def digest(folder: Path) -> str:
    """Of all names and bytes."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# ---- the same bits -----------------------------------------------------------------------


def test_painting_is_pinned_to_the_bit() -> None:
    """Integer arithmetic on a frozen stream: the same on every machine."""
    picture = paint(RandomState([7, 48, 0]), 48, most=6, sides=(160, 400))
    found = hashlib.sha256(picture.pixels.tobytes() + picture.mask.tobytes()).hexdigest()
    assert found[:16] == "49211f030393e53f"
    assert picture.shapes


@pytest.mark.parametrize("task", MAKERS)
def test_twice_the_same_files(task: str, tmp_path: Path) -> None:
    make, _ = MAKERS[task]
    for name in "ab":
        make(tmp_path / name, count=5, size=40, seed=3)
    make(tmp_path / "other", count=5, size=40, seed=4)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "other")


def test_a_larger_set_begins_with_the_smaller(tmp_path: Path) -> None:
    few = DetectionSet(make_detection(tmp_path / "few", count=3, size=40, seed=1))
    many = DetectionSet(make_detection(tmp_path / "many", count=6, size=40, seed=1))
    for (picture, boxes), (other, others) in zip(few, many, strict=False):
        assert torch.equal(picture, other)
        assert torch.equal(boxes, others)
    assert not torch.equal(many[0][0], many[3][0])


# ---- whole or absent ---------------------------------------------------------------------


@pytest.mark.parametrize("task", MAKERS)
def test_making_a_set_again_touches_nothing(task: str, tmp_path: Path) -> None:
    make, _ = MAKERS[task]
    make(tmp_path / "set", count=4, size=32, seed=0)
    before = times(tmp_path)
    make(tmp_path / "set", count=4, size=32, seed=0)
    assert times(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"], "something was left behind"


def test_another_set_is_never_overwritten(tmp_path: Path) -> None:
    make_detection(tmp_path / "set", count=4, size=32, seed=0)
    before = digest(tmp_path)
    with pytest.raises(UsageError, match=r"holds 4 detection .* seed 0, not 4 .* seed 1"):
        make_detection(tmp_path / "set", count=4, size=32, seed=1)
    with pytest.raises(UsageError, match="not 4 segmentation"):
        make_segmentation(tmp_path / "set", count=4, size=32, seed=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a set of pictures"):
        make_detection(tmp_path / "mine", count=4, size=32, seed=0)
    shutil.rmtree(tmp_path / "mine")
    assert digest(tmp_path) == before


@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_a_damaged_set_is_made_again(harm: str, tmp_path: Path) -> None:
    folder = make_segmentation(tmp_path / "set", count=4, size=32, seed=0)
    before = digest(folder)
    victim = folder / "masks" / "000002.png"
    if harm == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    make_segmentation(folder, count=4, size=32, seed=0)
    assert digest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_set_whose_writing_failed_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = [], codec.write

    def full_disk(path: Path, pixels: np.ndarray) -> int:
        written.append(path)
        if len(written) > 2:
            raise OSError(28, "No space left on device")
        return real(path, pixels)

    monkeypatch.setattr(codec, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_detection(tmp_path / "set", count=4, size=32, seed=0)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(DetectionSet(make_detection(tmp_path / "set", count=4, size=32, seed=0))) == 4


def test_a_killed_writer_leaves_no_set(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from terrazzo.zoo.data import codec, make_detection\n"
        "real = codec.write\n"
        "codec.write = lambda path, pixels: (\n"
        "    os.kill(os.getpid(), 9) if '000002' in path.name else real(path, pixels))\n"
        "make_detection(pathlib.Path(sys.argv[1]), count=4, size=32, seed=0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "set")], check=False)
    assert ended.returncode == -9
    assert not (tmp_path / "set").exists()
    assert len(DetectionSet(make_detection(tmp_path / "set", count=4, size=32, seed=0))) == 4


def test_several_may_make_one_set_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)

    def make(_: int) -> int:
        barrier.wait()
        make_detection(tmp_path / "set", count=12, size=48, seed=0)
        return len(DetectionSet(tmp_path / "set"))

    with ThreadPoolExecutor(3) as makers:
        assert list(makers.map(make, range(3))) == [12, 12, 12]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 pictures"):
        make_detection(tmp_path / "set", count=0, size=32, seed=0)
    with pytest.raises(UsageError, match="8 pixels"):
        make_detection(tmp_path / "set", count=1, size=8, seed=0)
    with pytest.raises(UsageError, match="no pictures in"):
        DetectionSet(tmp_path / "set")
    make_detection(tmp_path / "set", count=1, size=32, seed=0)
    with pytest.raises(UsageError, match="reads classification"):
        ClassificationSet(tmp_path / "set")


# ---- labels that fit ---------------------------------------------------------------------


def test_boxes_lie_around_the_shapes_of_the_mask(tmp_path: Path) -> None:
    size = 64
    detection = DetectionSet(make_detection(tmp_path / "d", count=24, size=size, seed=0))
    segmentation = SegmentationSet(make_segmentation(tmp_path / "s", count=24, size=size, seed=0))
    counts, labels = set(), set()
    for (picture, targets), (same, mask) in zip(detection, segmentation, strict=True):
        assert picture.dtype == mask.dtype == torch.uint8
        assert picture.shape == (3, size, size)
        assert targets.shape == (6, 5)
        assert torch.equal(picture, same)
        assert mask.shape == (size, size)
        rebuilt = torch.zeros_like(mask, dtype=torch.bool)
        for label, x, y, w, h in targets[targets[:, 0] >= 0].tolist():
            left, top = round((x - w / 2) * size), round((y - h / 2) * size)
            right, bottom = round((x + w / 2) * size), round((y + h / 2) * size)
            inside = mask[top:bottom, left:right] == 1 + label
            assert bool(inside[0].any() and inside[-1].any()), "the box is too high"
            assert bool(inside[:, 0].any() and inside[:, -1].any()), "the box is too wide"
            rebuilt[top:bottom, left:right] |= inside
            labels.add(label)
        assert torch.equal(rebuilt, mask > 0), "a shape has no box"
        counts.add(int((targets[:, 0] >= 0).sum()))
    assert counts >= {1, 3, 5}
    assert labels == set(range(len(CLASSES)))


def test_classes_take_turns(tmp_path: Path) -> None:
    found = ClassificationSet(make_classification(tmp_path / "c", count=7, size=32, seed=0))
    assert [label for _, label in found] == [0, 1, 2, 0, 1, 2, 0]


def test_pictures_are_real_files(tmp_path: Path) -> None:
    folder = make_segmentation(tmp_path / "s", count=1, size=32, seed=0)
    assert (folder / "pictures" / "000000.jpg").read_bytes()[:3] == b"\xff\xd8\xff"
    assert (folder / "masks" / "000000.png").read_bytes()[:4] == b"\x89PNG"


def test_jpeg_keeps_close_to_the_painting(tmp_path: Path) -> None:
    picture = paint(RandomState(0), 64, most=6, sides=(160, 400))
    codec.write(tmp_path / "a.jpg", picture.pixels)
    codec.write(tmp_path / "a.png", picture.pixels)
    painted = torch.from_numpy(picture.pixels).permute(2, 0, 1)
    assert torch.equal(codec.read_picture(tmp_path / "a.png"), painted)
    off = codec.read_picture(tmp_path / "a.jpg").int() - painted.int()
    assert 0 < off.abs().float().mean() < 6


def test_transform_sees_picture_and_target(tmp_path: Path) -> None:
    folder = make_segmentation(tmp_path / "s", count=2, size=32, seed=0)
    plain = SegmentationSet(folder)
    flipped = SegmentationSet(folder, lambda picture, mask: (picture.flip(-1), mask.flip(-1)))
    assert torch.equal(flipped[1][0].flip(-1), plain[1][0])
    assert torch.equal(flipped[1][1].flip(-1), plain[1][1])


def test_sets_batch_in_a_loader(tmp_path: Path) -> None:
    found = DetectionSet(make_detection(tmp_path / "d", count=5, size=32, seed=0))
    pictures, targets = next(iter(DataLoader(found, batch_size=4)))
    assert (tuple(pictures.shape), tuple(targets.shape)) == ((4, 3, 32, 32), (4, 6, 5))


# ---- without Pillow ----------------------------------------------------------------------


def test_without_pillow_the_zoo_imports_and_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from pathlib import Path\n"
        "import terrazzo.zoo.data as data\n"
        "from terrazzo.errors import UsageError\n"
        "try: data.make_detection(Path(sys.argv[1]), count=1, size=32, seed=0)\n"
        "except UsageError as error: print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "set")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "pip install terrazzo[data]" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_labels_that_are_no_labels_are_refused(tmp_path: Path) -> None:
    folder = make_detection(tmp_path / "set", count=1, size=32, seed=0)
    (folder / store.LABELS).write_text("{}")
    with pytest.raises(UsageError, match="no pictures record"):
        make_detection(folder, count=1, size=32, seed=0)
    with pytest.raises(UsageError, match="no pictures record"):
        DetectionSet(folder)

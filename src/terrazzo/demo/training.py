"""The demo's training script, as each device runs it: ``python -m terrazzo.demo.training``.

An ordinary script, but that it keeps the final weights and what they find, and prints a line of
JSON per step for the progress bar.
"""

from __future__ import annotations

import copy
import itertools
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Making any optimiser loads this; loaded now, it counts as part of the idle process.
import torch._dynamo
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import terrazzo as tz
from terrazzo.demo.job import DemoJob
from terrazzo.errors import TerrazzoError
from terrazzo.records import document
from terrazzo.records.detections import Detections, Mark, Scene
from terrazzo.report import png
from terrazzo.runtime.net import Net
from terrazzo.zoo.data import CLASSES, DetectionSet, make_detection
from terrazzo.zoo.yolo import ANCHORS_SMALL, YoloLoss, decode, yolov2_small

SCENES = 6
SURE = 0.4


def main() -> int:
    """Trains on this device; argument 1 is the folder of the job, 2 that of this run."""
    desk, folder = Path(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a device that waits for another too
    try:
        train(DemoJob.read(desk), desk, folder)
    except TerrazzoError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def train(job: DemoJob, desk: Path, folder: Path) -> None:
    device = tz.init()
    torch.manual_seed(job.seed)
    model = yolov2_small(classes=len(CLASSES)).double()
    example = torch.zeros(job.batch, 3, job.size, job.size, dtype=torch.float64)
    net = tz.parallelize(model, (example,))
    pictures = DetectionSet(_made(job, desk / "data")) if device == 0 else None
    criterion = YoloLoss(ANCHORS_SMALL)
    optimizer = torch.optim.AdamW(net.parameters(), job.learning_rate)
    # A quick rise and a long fall; a very short run sees the rise only.
    schedule = OneCycleLR(
        optimizer, job.learning_rate, total_steps=max(job.steps, 10), pct_start=0.2
    )
    loader = batches(pictures, job) if pictures else None
    for step, (x, y) in enumerate(tz.feed(loader, net), start=1):
        loss = criterion(net(x.double() / 255), y)
        loss.backward()
        optimizer.step()
        tz.log(loss=loss, rate=schedule.get_last_lr()[0])
        if step < job.steps:
            schedule.step()
        optimizer.zero_grad()
        if device == 0:
            print(json.dumps({"step": step, "loss": loss.item()}))
    if pictures:
        state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
        save_file(state, folder / "weights.safetensors")
        if folder == desk:  # once is enough: the other run has the same weights
            look(net, pictures, folder)


def _made(job: DemoJob, data: Path) -> Path:
    return make_detection(data, count=job.pictures, size=job.size, seed=job.seed)


def batches(pictures: DetectionSet, job: DemoJob) -> Iterator[Any]:
    """The same batches in the same order, whoever reads them."""
    order = torch.Generator().manual_seed(job.seed)
    loader = DataLoader(
        pictures, batch_size=job.batch, shuffle=True, generator=order, drop_last=True
    )
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    return itertools.islice(epochs, job.steps)


def look(net: Net, pictures: DetectionSet, folder: Path) -> None:
    """What the trained network sees on a few pictures: a plain copy of it needs no devices."""
    plain = copy.deepcopy(net).eval()
    shown = [pictures[index] for index in range(min(SCENES, len(pictures)))]
    x = torch.stack([picture for picture, _ in shown])
    with torch.no_grad():
        found = decode(plain(x.double() / 255), ANCHORS_SMALL, threshold=SURE)
    scenes = []
    for number, ((picture, targets), rows) in enumerate(zip(shown, found, strict=True)):
        name = f"picture-{number}.png"
        (folder / name).write_bytes(png.encode(picture.permute(1, 2, 0).contiguous().numpy()))
        true = [_mark([row[0], torch.ones(()), *row[1:]]) for row in targets if row[0] >= 0]
        scenes.append(Scene(name, tuple(_mark(list(row)) for row in rows), tuple(true)))
    caption = (
        f"These are among the {len(pictures)} pictures it trained on: a short run learns them by "
        "heart, and would find little on others."
    )
    found_all = Detections(tuple(scenes), caption)
    document.write(folder / "detections.json", found_all.to_json() + "\n")


def _mark(row: list[Tensor]) -> Mark:
    """From class, score, centre and sides."""
    kind, score, x, y, width, height = (float(part) for part in row)
    return Mark(
        label=CLASSES[int(kind)],
        score=round(score, 4),
        left=round(x - width / 2, 4),
        top=round(y - height / 2, 4),
        right=round(x + width / 2, 4),
        bottom=round(y + height / 2, 4),
    )


if __name__ == "__main__":
    sys.exit(main())

"""Train a detector the way it is done in earnest, from pictures and boxes on disk.

    python examples/detect.py                                alone
    terrazzo run --on 3 examples/detect.py --epochs 4        on three devices of this machine

The backbone was trained as a classifier (by classify.py, called here if its weights are missing),
is frozen for the first epochs and trained with the rest afterwards. Pictures are flipped and
recoloured as they are read, and come at another size every few steps. An average of the weights is
judged after each epoch; the judgement lowers the learning rate, keeps the best and ends the run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

import terrazzo as tz
from terrazzo.zoo.data import CLASSES, DetectionSet, make_detection
from terrazzo.zoo.precision import mean_average_precision
from terrazzo.zoo.yolo import YoloLoss, decode, yolov2_small


def options_from_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small YOLOv2 on synthetic shapes.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--frozen", type=int, default=2, help="epochs with a frozen backbone")
    parser.add_argument("--patience", type=int, default=4, help="epochs without progress to stop")
    parser.add_argument("--minutes", type=float, default=60.0, help="time to stop after")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 128, 160], help="16 times n")
    parser.add_argument("--every", type=int, default=4, help="steps at one size")
    parser.add_argument("--count", type=int, default=240, help="pictures to train on")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate")
    parser.add_argument("--warm-up", type=int, default=20, help="steps to reach it in")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--data", type=Path, default=Path("runs/data/detect"))
    parser.add_argument("--backbone", type=Path, default=Path("runs/classify.safetensors"))
    parser.add_argument(
        "--pretraining", type=int, default=6, help="epochs, if there is no backbone"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/detect.safetensors"))
    return parser.parse_args()


# ---- data: on the device that reads ------------------------------------------------------


def augment(picture: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Perhaps mirrored; brightness of each channel and contrast a little off."""
    if torch.rand(()) < 0.5:
        picture, boxes = picture.flip(-1), boxes.clone()
        boxes[:, 1] = torch.where(boxes[:, 0] >= 0, 1 - boxes[:, 1], boxes[:, 1])
    contrast = torch.empty(()).uniform_(0.7, 1.3)
    brightness = torch.empty(3, 1, 1).uniform_(-25, 25)
    jittered = (picture.float() - 128) * contrast + 128 + brightness
    return jittered.round().clamp(0, 255).byte(), boxes


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """As many rows of boxes as the fullest picture of the batch needs."""
    pictures, boxes = default_collate(samples)
    most = int((boxes[..., 0] >= 0).sum(1).max())
    return pictures, boxes[:, :most]


class MultiScale:
    """The batches of a loader, at another size every few steps."""

    def __init__(self, loader: DataLoader, sizes: list[int], every: int) -> None:
        self.loader, self.sizes, self.every, self.step = loader, sizes, every, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pictures, boxes in self.loader:
            size = self.sizes[self.step // self.every % len(self.sizes)]
            self.step += 1
            resized = F.interpolate(pictures.float(), size, mode="bilinear", antialias=True)
            yield resized.round().clamp(0, 255).byte(), boxes


def loaders(options: argparse.Namespace) -> tuple[MultiScale, DataLoader]:
    size, tests = max(options.sizes), max(options.count // 5, options.batch)
    train = make_detection(options.data / "train", count=options.count, size=size, seed=0)
    test = make_detection(options.data / "test", count=tests, size=size, seed=1)
    mixed = DataLoader(
        DetectionSet(train, augment),
        options.batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    plain = DataLoader(DetectionSet(test), options.batch)
    return MultiScale(mixed, options.sizes, options.every), plain


# ---- the backbone ------------------------------------------------------------------------


def load_backbone(model: nn.Module, options: argparse.Namespace, device: int) -> None:
    """Only device 0 needs the file: parallelize takes its weights for all."""
    if not tz.agree(options.backbone.exists()):
        import classify  # the script beside this one

        arguments = [f"--out={options.backbone}", f"--data={options.data / 'classify'}"]
        arguments += [f"--epochs={options.pretraining}", f"--count={options.count}"]
        classify.main([*arguments, *(["--double"] if options.double else [])])
    if device == 0:
        weights = load_file(options.backbone)
        model.load_state_dict(
            {name: w for name, w in weights.items() if name.startswith("backbone.")}, strict=False
        )


def set_frozen(net: nn.Module, frozen: bool) -> None:
    net.train()
    net.backbone.train(not frozen)
    net.backbone.requires_grad_(not frozen)


# ---- training ----------------------------------------------------------------------------


def main() -> None:
    options = options_from_command_line()
    dtype = torch.float64 if options.double else torch.float32
    started = time.monotonic()
    device = tz.init()

    torch.manual_seed(0)
    model = yolov2_small(classes=len(CLASSES))
    load_backbone(model, options, device)
    torch.manual_seed(1)
    train, test = loaders(options) if device == 0 else (None, None)

    side = max(options.sizes)
    example = torch.zeros(options.batch, 3, side, side, dtype=dtype)
    net = tz.parallelize(model.to(dtype), (example,))
    criterion = YoloLoss(net.anchors)
    optimizer = torch.optim.SGD(net.parameters(), options.rate, momentum=0.9, weight_decay=5e-4)
    warm_up = LinearLR(optimizer, 0.1, total_iters=options.warm_up)
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    judged = tz.parallelize(average.module.eval(), (example,))

    best, waited = float("inf"), 0
    for epoch in range(options.epochs):
        set_frozen(net, epoch < options.frozen)
        for x, boxes in tz.feed(train, net):
            loss = criterion(net(x.to(dtype) / 255), boxes)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 20.0)
            optimizer.step()
            warm_up.step()
            average.update_parameters(net)
        score, precision = judge(judged, test, dtype)
        score = tz.agree(score)  # the last bits may differ between unlike devices
        plateau.step(score)
        if device == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(
                f"epoch {epoch + 1}: loss {loss.item():.3f}, validation {score:.3f}, "
                f"mAP {precision:.1%}, rate {rate:.2g}",
                flush=True,
            )
        best, waited = (score, 0) if score < best else (best, waited + 1)
        if waited == 0:
            save(judged, options.out, device)
        late = time.monotonic() - started > 60 * options.minutes
        if tz.agree(waited >= options.patience or late):  # clocks differ; the decision may not
            break


@torch.no_grad()
def judge(net: nn.Module, test: DataLoader | None, dtype: torch.dtype) -> tuple[float, float]:
    """The loss and the mean average precision on pictures not trained on."""
    criterion, total, pictures = YoloLoss(net.anchors), 0.0, 0
    found: list[Tensor] = []
    truth: list[Tensor] = []
    for x, boxes in tz.feed(test, net):
        prediction = net(x.to(dtype) / 255)
        total += float(criterion(prediction, boxes)) * len(boxes)
        pictures += len(boxes)
        found += decode(prediction, net.anchors, threshold=0.05)
        truth += boxes
    return total / pictures, mean_average_precision(found, truth, classes=len(CLASSES))


def save(net: nn.Module, path: Path, device: int) -> None:
    """Asked of all devices, written by one; the file is whole or absent."""
    state = net.state_dict()
    if device == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        save_file(state, part)
        part.replace(path)


if __name__ == "__main__":
    main()

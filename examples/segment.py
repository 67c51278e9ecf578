"""Train a U-Net to colour shapes: gradients are accumulated and clipped, and the best net is kept.

python examples/segment.py                               alone
terrazzo run --on 3 examples/segment.py --epochs 3       on three devices of this machine
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

import terrazzo as tz
from terrazzo.zoo.data import CLASSES, SegmentationSet, make_segmentation
from terrazzo.zoo.unet import unet


def options_from_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a U-Net on synthetic shapes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each step")
    parser.add_argument("--size", type=int, default=96, help="pixels on each side, 16 times n")
    parser.add_argument("--count", type=int, default=120, help="pictures in all")
    parser.add_argument("--up", choices=["transposed", "bilinear"], default="bilinear")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--data", type=Path, default=Path("runs/data/segment"))
    parser.add_argument("--out", type=Path, default=Path("runs/segment.safetensors"))
    return parser.parse_args()


def main() -> None:
    options = options_from_command_line()
    dtype = torch.float64 if options.double else torch.float32
    torch.manual_seed(0)
    device = tz.init()

    train = test = None
    if device == 0:
        make_segmentation(options.data, count=options.count, size=options.size, seed=0)
        parts = random_split(SegmentationSet(options.data), [0.8, 0.2])
        train = DataLoader(parts[0], options.batch, shuffle=True, drop_last=True)
        test = DataLoader(parts[1], options.batch)

    model = unet(base=8, up=options.up, classes=1 + len(CLASSES)).to(dtype)
    example = torch.zeros(options.batch, 3, options.size, options.size, dtype=dtype)
    net = tz.parallelize(model, (example,))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    best = -1.0
    for epoch in range(options.epochs):
        net.train()
        for step, (x, mask) in enumerate(tz.feed(train, net), start=1):
            loss = F.cross_entropy(net(x.to(dtype) / 255), mask.long())
            (loss / options.accumulate).backward()
            if step % options.accumulate == 0:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        score = tz.agree(measured(net, test, dtype))  # one number decides on all devices
        if device == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, overlap {score:.1%}", flush=True)
        if score > best:
            best = score
            save(net, options.out, device)


@torch.no_grad()
def measured(net: nn.Module, test: DataLoader | None, dtype: torch.dtype) -> float:
    """Intersection over union, the mean over classes."""
    net.eval()
    shared, union = torch.zeros(1 + len(CLASSES)), torch.zeros(1 + len(CLASSES))
    for x, mask in tz.feed(test, net):
        found = net(x.to(dtype) / 255).argmax(1)
        shared += by_class(found[found == mask])
        union += by_class(found) + by_class(mask) - by_class(found[found == mask])
    return float((shared / union.clamp(min=1)).mean())


def by_class(labels: Tensor) -> Tensor:
    return torch.bincount(labels.flatten().long(), minlength=1 + len(CLASSES))


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

"""Train a classifier: an ordinary PyTorch script, and four lines of Terrazzo marked "tz".

    python examples/classify.py                              alone
    terrazzo run --on 3 examples/classify.py --epochs 5      on three devices of this machine

The weights it writes are those of a plain model: load them anywhere, or give them to detect.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, random_split

import terrazzo as tz
from terrazzo.zoo.data import ClassificationSet, make_classification
from terrazzo.zoo.yolo import darknet_small


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of synthetic shapes.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="pixels on each side")
    parser.add_argument("--count", type=int, default=300, help="pictures in all")
    parser.add_argument("--enough", type=float, default=0.98, help="accuracy to stop at")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--data", type=Path, default=Path("runs/data/classify"))
    parser.add_argument("--out", type=Path, default=Path("runs/classify.safetensors"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_from(arguments)
    dtype = torch.float64 if options.double else torch.float32
    torch.manual_seed(0)
    device = tz.init()  # tz

    train = test = None
    if device == 0:  # one device reads; the others need no data on their disks
        make_classification(options.data, count=options.count, size=options.size, seed=0)
        parts = random_split(ClassificationSet(options.data), [0.8, 0.2])
        train = DataLoader(parts[0], options.batch, shuffle=True, drop_last=True)
        test = DataLoader(parts[1], options.batch)

    model = darknet_small().to(dtype)
    example = torch.zeros(options.batch, 3, options.size, options.size, dtype=dtype)
    net = tz.parallelize(model, (example,))  # tz
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)

    for epoch in range(options.epochs):
        net.train()
        for x, y in tz.feed(train, net):  # tz: bytes on the wire, numbers here
            loss = F.cross_entropy(net(x.to(dtype) / 255), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = measured(net, test, dtype)
        if device == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.1%}", flush=True)
        if tz.agree(accuracy >= options.enough):  # tz: all stop, or none
            break
    save(net, options.out, device)


@torch.no_grad()
def measured(net: nn.Module, test: DataLoader | None, dtype: torch.dtype) -> float:
    """The share of pictures that get their own class."""
    net.eval()
    right = seen = 0
    for x, y in tz.feed(test, net):
        right += int((net(x.to(dtype) / 255).argmax(1) == y).sum())
        seen += len(y)
    return right / seen


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

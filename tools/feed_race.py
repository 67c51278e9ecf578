"""A race of tz.feed against DataLoaders of 0 to 8 workers, on storage as slow as asked for.

    sudo python tools/feed_race.py --medium sd --train accelerator

Pictures are JPEG files that are dropped from the page cache after each read, so that every epoch
reads them from storage, which a control group of either version slows down (root). "accelerator"
trains as one would that leaves the cores alone: it sleeps; "cpu" computes on one core. All settings
take turns, several rounds, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import terrazzo as tz
from terrazzo.lab.cell import inside, slow_storage
from terrazzo.records.machine import Machine
from terrazzo.zoo.data import codec, make_detection


class Medium(NamedTuple):
    read_bytes_per_s: int
    reads_per_s: int


MEDIA = {
    "sd": Medium(20 << 20, 600),
    "hdd": Medium(120 << 20, 120),
    "nvme": Medium(0, 0),
}


class Pictures(Dataset[Any]):
    """JPEG files, read from storage every time."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted((folder / "pictures").glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        found = codec.read_picture(path)
        forget(path)
        return found, index % 3


def forget(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def on(medium: Medium, folder: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` gives where files come from that medium."""
    if not medium.reads_per_s:
        return work()
    with slow_storage(folder, **medium._asdict()) as group:
        return inside(group, work)


class Trainee:
    """What a step does with a batch."""

    def __init__(self, kind: str, step_s: float) -> None:
        self.kind, self.step_s = kind, step_s
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.kind == "accelerator":
            time.sleep(self.step_s)
            return
        begin = time.thread_time()
        while time.thread_time() - begin < self.step_s:
            loss = nn.functional.cross_entropy(self.model(x.float() / 255), y)
            loss.backward()  # type: ignore[no-untyped-call]


class Lap(NamedTuple):
    step_s: float
    stall: float


def lap(batches: Iterator[Any], trainee: Trainee, steps: int) -> Lap:
    waited, begin = 0.0, time.perf_counter()
    for _ in range(steps):
        at = time.perf_counter()
        x, y = next(batches)
        waited += time.perf_counter() - at
        trainee.step(x, y)
    took = time.perf_counter() - begin
    return Lap(took / steps, waited / took)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def race(args: argparse.Namespace, data: Pictures, trainee: Trainee) -> dict[str, Any]:
    net = tz.parallelize(trainee.model, (torch.zeros(2, 3, 64, 64),))
    runners: dict[str, Iterator[Any]] = {}
    for cache in [0, None] if args.cache else [0]:
        torch.manual_seed(0)
        loader = DataLoader(data, args.batch, shuffle=True, drop_last=True)
        name = "tz.feed" if cache is None else "tz.feed, cache=0"
        runners[name] = endless_feed(loader, net, cache)
        begin = time.perf_counter()
        lap(runners[name], trainee, args.tuning)
        print(f"{name}: {time.perf_counter() - begin:.0f} s of tuning", file=sys.stderr)
    found: dict[str, list[Lap]] = {}
    for _ in range(args.rounds):
        for workers in range(args.most + 1):
            loader = DataLoader(
                data, args.batch, shuffle=True, drop_last=True, num_workers=workers,
                persistent_workers=workers > 0,
            )  # fmt: skip
            batches = endless(loader)
            lap(batches, trainee, args.warm)
            found.setdefault(f"{workers} workers", []).append(lap(batches, trainee, args.steps))
            del batches, loader
        for name, batches in runners.items():
            lap(batches, trainee, args.warm)
            found.setdefault(name, []).append(lap(batches, trainee, args.steps))
    return {name: min(laps)._asdict() for name, laps in found.items()}


def endless_feed(loader: Any, net: tz.Net, cache: int | None) -> Iterator[Any]:
    while True:
        yield from tz.feed(loader, net, cache=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medium", choices=MEDIA, default="sd")
    parser.add_argument("--train", choices=("accelerator", "cpu"), default="accelerator")
    parser.add_argument("--step-s", type=float, default=0.06)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--tuning", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--cache", action="store_true", help="also with samples held in memory")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "data"
        make_detection(folder, count=args.pictures, size=args.size, seed=1)
        os.sync()
        data = Pictures(folder)
        for path in data.paths:
            forget(path)
        trainee = Trainee(args.train, args.step_s)
        found = on(MEDIA[args.medium], folder, lambda: race(args, data, trainee))
    fixed = min(row["step_s"] for name, row in found.items() if "workers" in name)
    for name, row in found.items():
        print(
            f"{name:>18}: {row['step_s'] * 1e3:7.1f} ms a step, {row['stall']:6.1%} waiting, "
            f"{row['step_s'] / fixed:.3f} of the best fixed"
        )
    facts = {"medium": args.medium, "train": args.train, "found": found}
    print(json.dumps({**facts, "machine": Machine.here().processor}))


if __name__ == "__main__":
    main()

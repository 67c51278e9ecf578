"""What is read from storage in each epoch: samples held by tz.feed, LRU, and the page cache.

    sudo python tools/feed_cache.py --share 0.5

All three have the same memory, a share of the data set, and the same kind of order: every sample
once an epoch, shuffled anew. LRU is counted by going through such orders with the real sizes of the
files. The page cache belongs to a process of its own in a control group of either version (root)
that reads the same files; what the system really read for it is told by the kernel.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import terrazzo as tz
from terrazzo.lab.cell import cell, join
from terrazzo.records.event import read_events
from terrazzo.runtime.recorder import Recorder

BESIDE_BYTES = 4 << 20
"""Page tables, and what reading itself takes."""
READER = """
import os, random, sys
paths = sys.argv[2:]
drawn = random.Random(1)
os.write(1, b"ready\\n")
sys.stdin.readline()
def read_so_far():
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])
for epoch in range(int(sys.argv[1])):
    before = read_so_far()
    drawn.shuffle(paths)
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        while os.read(file, 1 << 20):
            pass
        os.close(file)
    print(read_so_far() - before, flush=True)
"""


class Blobs(Dataset[Any]):
    """Files of different sizes; a sample draws, so that only its file can be held."""

    def __init__(self, folder: Path, count: int, size_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(3)
        self.paths = [folder / f"{number:05}.bin" for number in range(count)]
        for path in self.paths:
            if not path.exists():
                path.write_bytes(os.urandom(draw.randrange(size_bytes // 2, size_bytes * 3 // 2)))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self.paths[index].read_bytes()
        x = torch.frombuffer(bytearray(data[:768]), dtype=torch.uint8).reshape(3, 16, 16)
        return x.roll(int(torch.randint(16, ())), 2), 0


def held(data: Blobs, epochs: int, budget_bytes: int) -> list[float]:
    """Bytes that tz.feed read in each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(4, 3, 16, 16),))
        net.links.recorder = recorder = Recorder(Path(folder), 0)
        for _ in range(epochs):
            for _ in tz.feed(data, net, batch_size=16, workers=2, cache=budget_bytes):
                pass
        recorder.flush()
        rows = [dict(e.values) for e in read_events(Path(folder)) if e.name == "epoch"]
        net.links.recorder = None
        return [row["read_bytes"] for row in rows]


def lru(sizes: Sequence[int], epochs: int, budget_bytes: int) -> list[float]:
    kept: OrderedDict[int, int] = OrderedDict()
    draw, used, found = random.Random(2), 0, []
    order = list(range(len(sizes)))
    for _ in range(epochs):
        draw.shuffle(order)
        read = 0
        for index in order:
            if index in kept:
                kept.move_to_end(index)
                continue
            read += sizes[index]
            kept[index] = sizes[index]
            used += sizes[index]
            while used > budget_bytes:
                used -= kept.popitem(last=False)[1]
        found.append(float(read))
    return found


def page_cache(paths: Sequence[Path], epochs: int, budget_bytes: int) -> list[float]:
    """Of a process whose group has so much memory for files."""
    command = [sys.executable, "-c", READER, str(epochs), *map(str, paths)]
    with cell() as group, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()  # what it has taken so far counts for the group that it comes from
        group.limit_memory(budget_bytes + BESIDE_BYTES)
        join(group, child.pid)
        for path in paths:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        child.stdin.write("go\n")
        child.stdin.flush()
        return [float(line) for line in child.stdout]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--size-bytes", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        data = Blobs(Path(folder), args.samples, args.size_bytes)
        os.sync()
        sizes = [path.stat().st_size for path in data.paths]
        total, budget = sum(sizes), int(args.share * sum(sizes))
        rows = {
            "tz.feed": held(data, args.epochs, budget),
            "LRU": lru(sizes, args.epochs, budget),
            "page cache": page_cache(data.paths, args.epochs, budget),
        }
    print(f"{len(sizes)} files, {total / 2**20:.1f} MiB; memory for {args.share:.0%} of them")
    print("share of the data set read from storage, epoch by epoch")
    for name, read in rows.items():
        print(f"{name:>12}: " + " ".join(f"{one / total:6.3f}" for one in read))


if __name__ == "__main__":
    main()

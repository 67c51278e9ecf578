"""What tz.feed itself takes of the training loop, in processor time, beside a DataLoader.

    python tools/feed_overhead.py

Batches of eight small pictures that are in memory already, so that handing them over is nearly all
there is to do. Processor time of the training process, so that others on the machine do not count;
ways in turns, the median of them. Made in the loop: what is left after the time of a DataLoader is
the feed's own, with and without a record of the run. "files" are pictures that are read from small
files, each of which is held against what it was when it was first read.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import terrazzo as tz
from terrazzo.runtime.recorder import Recorder

BATCH, BATCHES, FIRST = 8, 250, 20


class Files(Dataset[Tensor]):
    """Each sample is the bytes of a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{number:05}.bin") for number in range(BATCH * BATCHES)]
        for path in self.paths:
            Path(path).write_bytes(bytes(3 * 32 * 32))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        data = bytearray(Path(self.paths[index]).read_bytes())
        return torch.frombuffer(data, dtype=torch.uint8).reshape(3, 32, 32)


def cpu_s(batches: Iterable[Any]) -> float:
    """Of the loop, for one batch; the first ones start workers and do not count."""
    begin, count = 0.0, 0
    for count, _ in enumerate(batches):
        if count == FIRST:
            begin = time.process_time()
    return (time.process_time() - begin) / (count - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pictures: Tensor = torch.zeros(BATCH * BATCHES, 3, 32, 32, dtype=torch.uint8)
    data = TensorDataset(pictures, torch.arange(len(pictures)))
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0)
        net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(BATCH, 3, 32, 32),))

        def fed(workers: int, is_recorded: bool, loader: Any = None) -> Iterable[Any]:
            net.links.recorder = recorder if is_recorded else None
            return tz.feed(loader or loaders[workers], net, workers=workers, cache=0)

        loaders = {workers: DataLoader(data, BATCH, shuffle=True) for workers in (0, 1)}
        files = DataLoader(Files(Path(folder)), BATCH, shuffle=True)
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            "DataLoader, no workers": lambda: DataLoader(data, BATCH, shuffle=True),
            "tz.feed, no workers": lambda: fed(0, False),
            "tz.feed, no workers, recorded": lambda: fed(0, True),
            "DataLoader, 1 worker": lambda: DataLoader(data, BATCH, shuffle=True, num_workers=1),
            "tz.feed, 1 worker": lambda: fed(1, False),
            "tz.feed, 1 worker, recorded": lambda: fed(1, True),
            "DataLoader, files": lambda: files,
            "tz.feed, files": lambda: fed(0, False, files),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.turns):
            for name, way in ways.items():
                found[name].append(cpu_s(way()))
        net.links.recorder = None
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    for name, seconds in found.items():
        base = statistics.median(found[f"DataLoader, {name.split(', ')[1]}"])
        each = statistics.median(seconds)
        print(f"{name:32}{each * 1e3:7.3f} ms a batch, {(each - base) * 1e3:+.3f} ms")


if __name__ == "__main__":
    main()

"""What recovery costs when nothing fails: turns of steps with and without it, in one run.

    terrazzo run --on 2 --no-record tools/recovery_cost.py 96 40

The arguments are the side of the pictures and how many pairs of turns. Turns take turns, so that
whatever else the machine does meets both. Time on the clock, and processor time of all devices.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import terrazzo as tz

STEPS = 20


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


class Trial:
    """One net, trained for a turn at a time."""

    def __init__(self, side: int, folder: Path) -> None:
        draw = torch.Generator().manual_seed(1)
        x, y = torch.randn(4, 3, side, side, generator=draw), torch.arange(4)
        self.net = tz.parallelize(model(), (x,))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01, momentum=0.9)
        own = folder / str(self.net.links.device)
        self.run = tz.Run(
            self.net, self.optimizer, loader=[(x, y)] * STEPS, every=10**9, checkpoints=own
        )
        links = self.net.links
        self._on = (links.recovery, links.control)

    def turn(self, *, recovery: bool, saves: bool) -> tuple[float, float]:
        """Seconds on the clock, and of all devices' processors."""
        links = self.net.links
        links.recovery, links.control = self._on if recovery else (None, None)
        links.gather(torch.zeros(1))
        begin, used = time.perf_counter(), time.process_time()
        for x, y in self.run.feed():
            loss = F.cross_entropy(self.net(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if saves:
            self.run.save()
        took_s = time.perf_counter() - begin
        if saves and self.run.scribe is not None:
            self.run.scribe.finish()  # in its processor time, and not in the loop's
        own = torch.tensor([time.process_time() - used], dtype=torch.float64)
        return took_s, float(links.gather(own).sum())


def told(name: str, pairs: list[tuple[Any, Any]], per: float) -> str:
    found = []
    for place, what in enumerate(("time", "processors")):
        ratios = sorted(1 + (b[place] / a[place] - 1) * per for a, b in pairs)
        quarter = len(ratios) // 4
        found.append(
            f"{what} {statistics.median(ratios):.4f} "
            f"({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
        )
    return f"{name}: {', '.join(found)}"


def main(side: int, pairs: int) -> None:
    torch.set_num_threads(1)
    tz.init()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(side, Path(folder))
        kinds = {"without": (False, False), "with": (True, False), "saving": (True, True)}
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for number in range(pairs + 2):
            for name, (recovery, saves) in kinds.items():
                took = trial.turn(recovery=recovery, saves=saves)
                if number > 1:  # the first ones warm up
                    rows[name].append(took)
    if trial.net.links.device == 0:
        step_s = statistics.median(took for took, _ in rows["without"]) / STEPS
        print(f"{step_s * 1e3:.1f} ms a step without, {pairs} turns of {STEPS} steps of each kind")
        print(told("recovery", list(zip(rows["without"], rows["with"], strict=True)), 1.0))
        every = list(zip(rows["with"], rows["saving"], strict=True))
        print(told(f"a checkpoint every {STEPS} steps", every, 1.0))
        print(told("a checkpoint every 100 steps", every, STEPS / 100))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

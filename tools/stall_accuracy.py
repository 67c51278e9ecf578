"""How true predictions of stalls are: predicted steps, and what happens when the change is made.

    python tools/stall_accuracy.py [--steps 30] [--turns 2] [--case NAME ...]

A data set whose stages cost what they are told to (fetching sleeps, pre-processing computes) feeds
a loop that sleeps in place of a model, so that costs are known and cores are free for
pre-processing. Each case is diagnosed from its trials alone; then the change is really made, and
its steps are held against the prediction, those of the quickest turn: what else runs on a machine
only adds. The last column is what was injected into a stage, and what of it was found there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from terrazzo.feed.diagnosis import Seen, diagnose
from terrazzo.feed.pipeline import Pipeline
from terrazzo.records.trial import COLD, MODES, USUAL, Trial

BATCH = 4


@dataclass(frozen=True)
class Case:
    """Milliseconds of a batch by stage, and of the loop."""

    loop_ms: float = 40.0
    fetch_ms: float = 40.0
    prepare_ms: float = 8.0
    workers: int = 0
    held: float = 0.0
    """The part of samples that cost no fetching, as if they were in memory."""


CASES = {
    "slow storage": Case(fetch_ms=120.0),
    "costly decoding": Case(fetch_ms=8.0, prepare_ms=40.0),
    "both": Case(fetch_ms=60.0, prepare_ms=30.0, loop_ms=60.0),
    "quick": Case(fetch_ms=8.0, prepare_ms=8.0, loop_ms=80.0),
}
SCRIPT = """
import json, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import terrazzo as tz

case, batch = json.loads(sys.argv[1]), int(sys.argv[2])

class Costly(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if (index * 0.6180339887) % 1.0 >= case["held"]:
            time.sleep(case["fetch_ms"] / batch / 1e3)
        end = time.thread_time() + case["prepare_ms"] / batch / 1e3
        while time.thread_time() < end:
            pass
        return torch.zeros(1, 8, 8), index

tz.init()
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
net = tz.parallelize(model, (torch.zeros(batch, 1, 8, 8),))
loader = DataLoader(Costly(), batch_size=batch, shuffle=True)
while True:
    for x, y in tz.feed(loader, net, workers=case["workers"], cache=0):
        time.sleep(case["loop_ms"] / 1e3)
        net(x).sum().backward()
"""


def trial(mode: str, steps: int, case: Case, folder: Path) -> Seen:
    folder.mkdir()
    environment = dict(os.environ)
    environment["TERRAZZO_TRIAL"] = Trial(mode, steps).to_text()
    environment["TERRAZZO_RUN"] = str(folder)
    command = [sys.executable, "-c", SCRIPT, json.dumps(asdict(case)), str(BATCH)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return Seen.read(folder)


def changes(case: Case, now: Pipeline) -> Mapping[str, tuple[Case, Pipeline]]:
    """By name, the case with one thing changed, and the pipeline with the same thing changed."""
    found = {f"{n} workers": (replace(case, workers=n), now.with_workers(n)) for n in (1, 2, 4)}
    found["half in memory"] = (replace(case, held=0.5), now.with_cache(0.5))
    half = replace(case, fetch_ms=case.fetch_ms / 2)
    found["storage twice as fast"] = (half, now.with_storage(0.5))
    small = replace(half, prepare_ms=case.prepare_ms / 2)
    found["pictures half as large"] = (small, now.with_pictures(0.5, 0.5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=2, help="of every change")
    parser.add_argument("--case", action="append", choices=tuple(CASES), default=[])
    options = parser.parse_args()
    print(f"{'case':<18}{'change':<26}{'predicted':>11}{'happened':>10}{'off':>7}  injected, found")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.case or CASES:
            folder = Path(scratch) / name.replace(" ", "-")
            folder.mkdir()
            one(name, CASES[name], folder, steps=options.steps, turns=options.turns)


def one(name: str, case: Case, folder: Path, *, steps: int, turns: int) -> None:
    seen = {mode: trial(mode, steps, case, folder / mode) for mode in MODES}
    found = diagnose(seen)
    cold = seen[COLD].stalls
    told = f"fetch {case.fetch_ms:g}, {cold.fetch_s * 1e3:.1f} ms; "
    told += f"prepare {case.prepare_ms:g}, {cold.prepare_s * 1e3:.1f} ms"
    row(name, "as it is", found.predicted_s, found.usual.step_s, told)
    for number, (change, (after, pipeline)) in enumerate(changes(case, found.pipeline).items()):
        places = [folder / f"change-{number}-{turn}" for turn in range(turns)]
        happened = min(trial(USUAL, steps, after, place).stalls.step_s for place in places)
        row(name, change, pipeline.step_s, happened)


def row(name: str, change: str, predicted_s: float, happened_s: float, told: str = "") -> None:
    off = predicted_s / happened_s - 1
    times = f"{predicted_s * 1e3:>8.1f} ms{happened_s * 1e3:>7.1f} ms{off:>+7.1%}"
    print(f"{name:<18}{change:<26}{times}  {told}", flush=True)


if __name__ == "__main__":
    main()

"""Feeding four devices over links of 94 and 940 Mbit: samples a second, and what storage reads.

    sudo python tools/feed_cluster.py [--links 94,940] [--samples 320] [--epochs 2]

Devices are namespaces with shaped links; their processors run at full speed, so that links and
cards are compared and nothing else. A card is played: a file is read, and then its process sleeps
until a card of that speed would have given it, one file after the other. A stored sample becomes a
picture of about three times its bytes, and a device needs a quarter of each batch.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import Dataset

import terrazzo as tz
from terrazzo.cluster import launch
from terrazzo.feed.choice import Choice
from terrazzo.feed.peers import Peers
from terrazzo.feed.twosteps import in_two_steps
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.preset import LinkSpeed, Preset
from terrazzo.lab.topology import Topology
from terrazzo.records.machine import Machine

DEVICES, BATCH, WORKERS, WARM = 4, 16, 2, 2
STORED_BYTES, SIDE = 40_000, 192
CARD_BYTES_PER_S, CARD_READS_PER_S = 20 << 20, 600
ROOM = 1.3
"""Of a quarter of the set, what each holds: who holds what is drawn, and not quite even."""
STEP_S = 0.06
NOTE = struct.Struct("<dq")


class Card:
    """Gives one file at a time, to all processes of a device; lies in a file that they share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(NOTE.pack(0.0, 0))

    def wait(self, size_bytes: int) -> None:
        """As long as it takes to read so much, after all that was asked for before."""
        file = os.open(self.path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_at, reads = NOTE.unpack(os.pread(file, NOTE.size, 0))
            took = max(size_bytes / CARD_BYTES_PER_S, 1 / CARD_READS_PER_S)
            free_at = max(free_at, time.monotonic()) + took
            os.pwrite(file, NOTE.pack(free_at, reads + 1), 0)
        finally:
            os.close(file)
        time.sleep(max(free_at - time.monotonic(), 0.0))


def reads_of(folder: Path) -> int:
    """Of the cards of all devices together."""
    return sum(NOTE.unpack(path.read_bytes())[1] for path in folder.glob("card-*"))


class Stored(Dataset[Any]):
    """Samples on a card."""

    def __init__(self, folder: Path, count: int, device: int) -> None:
        self.folder, self.count = folder, count
        self.card = Card(folder / f"card-{device}")

    def __len__(self) -> int:
        return self.count

    def fetch(self, index: int) -> bytes:
        with (self.folder / f"{index}.bin").open("rb") as file:
            data = file.read()
        self.card.wait(len(data))
        return data

    def decode(self, data: bytes) -> tuple[torch.Tensor, int]:
        size = 3 * SIDE * SIDE
        whole = bytearray((data * (size // len(data) + 1))[:size])
        return torch.frombuffer(whole, dtype=torch.uint8).reshape(3, SIDE, SIDE), data[0]

    @in_two_steps
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.decode(self.fetch(index))


@dataclass(frozen=True)
class Way:
    """One way of feeding."""

    name: str
    each: bool = False
    """All devices have the files and a card, and read for themselves."""
    parts: bool = False
    """A quarter of the files lies on the card of each device."""
    held: bool = False
    always: bool = False
    """Others are asked for what they hold, also where the card is faster."""
    ahead: bool | None = None
    step_s: float = 0.0

    def run(self, folder: Path, *, count: int, epochs: int) -> tuple[float, float] | None:
        """Samples a second and reads an epoch; None on all devices but one."""
        net = tz.parallelize(_model(), (torch.zeros(BATCH, 3, SIDE, SIDE),), layout="samples")
        me = net.links.device
        has_files = self.each or self.parts or me == 0
        data = Stored(folder, count, me) if has_files else None
        options: dict[str, Any] = {"reading": "each" if self.each else "reader"}
        options["cache"] = round(ROOM * count * STORED_BYTES / DEVICES) if self.held else 0
        if self.parts:
            options["mine"] = range(me, count, DEVICES)
        began, reads = 0.0, 0
        with ExitStack() as fixed:
            if self.ahead is not None:
                fixed.enter_context(patch.object(Choice, "is_ahead", self.ahead))
            if self.always:
                fixed.enter_context(patch.object(Peers, "_is_worth_it", lambda *_: True))
            for epoch in range(WARM + epochs):
                if epoch == WARM:
                    began, reads = time.perf_counter(), reads_of(folder)
                for _ in tz.feed(data, net, batch_size=BATCH, workers=WORKERS, **options):
                    time.sleep(self.step_s)
        if me:
            return None
        took_s = time.perf_counter() - began
        return epochs * count / took_s, (reads_of(folder) - reads) / epochs


WAYS = (
    Way("one reads from its card"),
    Way("one reads, a quarter held by each, as measured", held=True),
    Way("one reads, a quarter held by each, always asked", held=True, always=True),
    Way("each reads from its own card", each=True),
    Way("steps of 60 ms: one reads, not sent ahead", ahead=False, step_s=STEP_S),
    Way("steps of 60 ms: one reads, sent ahead", ahead=True, step_s=STEP_S),
    Way("steps of 60 ms: data in quarters, not sent ahead", parts=True, ahead=False, step_s=STEP_S),
    Way("steps of 60 ms: data in quarters, sent ahead", parts=True, ahead=True, step_s=STEP_S),
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def work(args: argparse.Namespace) -> None:
    """On each device: all ways, one after the other."""
    torch.set_num_threads(1)
    tz.init()
    for number, way in enumerate(WAYS):
        found = way.run(args.folder, count=args.samples, epochs=args.epochs)
        if found is not None:
            print(json.dumps([number, *found]), flush=True)
        gc.collect()  # workers of this way end before the next one begins


def race(args: argparse.Namespace, mbit: float) -> dict[int, tuple[float, float]]:
    """All ways on links of that speed."""
    found: dict[int, tuple[float, float]] = {}

    def heard(device: int, line: str) -> None:
        if not line.startswith("["):
            print(f"device {device}: {line.rstrip()}", file=sys.stderr)
            return
        number, rate, reads = json.loads(line)
        found[number] = rate, reads
        print(f"{mbit:g} Mbit, {WAYS[number].name}: {rate:.0f} samples/s, {reads:g} reads an epoch")

    board = Preset(
        name="fast", flops_per_s=1e12, threads=1, memory_bytes=2 << 30,
        wire=LinkSpeed(mbit * 1e6), wifi=None,
    )  # fmt: skip
    with LabHosts.open(Topology.parse(f"{DEVICES}xfast", {"fast": board})) as hosts:
        asked = ["--work", "--samples", str(args.samples), "--epochs", str(args.epochs)]
        command = [sys.executable, __file__, *asked, "--folder", str(args.folder)]
        result = launch(command, hosts, env={"TERRAZZO_MEASURE": "off"}, output=heard)
    if result.failure is not None:
        sys.exit(f"{mbit:g} Mbit: {result.failure}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="94,940", help="in Mbit (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=2, help="that count, after two that do not")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    speeds = [float(text) for text in args.links.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for number in range(args.samples):
            (args.folder / f"{number}.bin").write_bytes(os.urandom(STORED_BYTES))
        found = [race(args, mbit) for mbit in speeds]
    print("\n| samples/s (reads an epoch) | " + " | ".join(f"{s:g} Mbit" for s in speeds) + " |")
    print("| --- |" + " --- |" * len(speeds))
    for number, way in enumerate(WAYS):
        cells = [f"{rate:.0f} ({reads:g})" for rate, reads in (one[number] for one in found)]
        print(f"| {way.name} | {' | '.join(cells)} |")
    here = Machine.here()
    print(
        f"{here.processor}, {here.cores} cores, load {os.getloadavg()[0]:.0f}; {args.samples} "
        f"samples of {STORED_BYTES} bytes, batches of {BATCH}"
    )


if __name__ == "__main__":
    main()

"""Small files beside packed shards, read in random order from a slow medium: samples a second.

    sudo python tools/packing_gain.py [--samples 2000] [--seconds 8] [--scratch DIR]

Makes a file system in a file, fills it with pairs of small files (a picture and its label), packs
them with `terrazzo data pack`, and reads both ways on media of several speeds: the kernel bounds
requests and bytes a second of that one file system, for the processes that read. It is unmounted
before each turn, so that neither data nor names nor indices are in memory. Needs root.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from terrazzo.feed.packing import pack
from terrazzo.feed.shards import ShardSet
from terrazzo.lab.cell import inside, slow_storage

PICTURE_BYTES = (6_000, 18_000)


@dataclass(frozen=True)
class Medium:
    name: str
    reads_per_s: int
    read_bytes_per_s: int


MEDIA = (
    Medium("SD card", 1500, 40_000_000),
    Medium("hard disk", 120, 150_000_000),
    Medium("NVMe", 100_000, 1_500_000_000),
)


@contextmanager
def disk(scratch: Path, size_bytes: int) -> Iterator[tuple[Path, str]]:
    """A file system of its own; gives where it is mounted, and its device."""
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="packing-"))
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    made = ["losetup", "--direct-io=on", "--find", "--show", str(image)]
    device = subprocess.run(made, check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        subprocess.run(["mount", device, str(place)], check=True)
        yield place, device
    finally:
        subprocess.run(["umount", str(place)], check=False)
        subprocess.run(["losetup", "--detach", device], check=False)
        shutil.rmtree(folder)


def forget(place: Path, device: str) -> None:
    """Nothing of the file system is in memory afterwards."""
    subprocess.run(["umount", str(place)], check=True)
    subprocess.run(["mount", device, str(place)], check=True)


def fill(folder: Path, samples: int) -> list[str]:
    """Pairs of files in ten folders; gives their names without endings."""
    draw, names = random.Random(1), []
    for number in range(samples):
        name = f"{number % 10}/{number:06}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jpg").write_bytes(draw.randbytes(draw.randrange(*PICTURE_BYTES)))
        (folder / f"{name}.json").write_text(json.dumps({"label": number % 7}))
        names.append(name)
    return names


def rate(read: Callable[[int], object], samples: int, seconds: float) -> float:
    """Samples a second, in random order."""
    order = random.Random(2).sample(range(samples), samples)
    begin = time.perf_counter()
    done = 0
    while done < samples and time.perf_counter() - begin < seconds:
        read(order[done])
        done += 1
    return done / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    size = options.samples * 2 * (sum(PICTURE_BYTES) + 16384) + (64 << 20)
    with disk(options.scratch, size) as (place, device):
        names = fill(place / "files", options.samples)
        pack(place / "files", place / "shards")
        print(f"{options.samples} samples of two files; samples a second, one reader")
        print(f"{'medium':<12}{'small files':>12}{'shards':>10}{'gain':>8}")
        for medium in MEDIA:
            rates = []
            for packed in (False, True):
                forget(place, device)
                shards = ShardSet(place / "shards") if packed else None

                def read(index: int, shards: ShardSet | None = shards) -> object:
                    if shards is not None:
                        return shards.fetch(index)
                    path = place / "files" / names[index]
                    return [path.with_suffix(end).read_bytes() for end in (".jpg", ".json")]

                with slow_storage(
                    place, read_bytes_per_s=medium.read_bytes_per_s, reads_per_s=medium.reads_per_s
                ) as group:
                    rates.append(
                        inside(group, partial(rate, read, options.samples, options.seconds))
                    )
                if shards is not None:
                    shards.close()
            small, large = rates
            print(
                f"{medium.name:<12}{small:>12.0f}{large:>10.0f}{large / small:>7.1f}x", flush=True
            )


if __name__ == "__main__":
    main()

"""Cases: which model, at what size and batch, on which devices. Data, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.errors import UsageError

SIDES = {
    "unet32": 512, "unet32-bilinear": 512,
    "yolov2": 416, "yolov2-front": 416, "yolov2-front-bare": 416,
    "yolov2-small": 128, "darknet-small": 128, "vgg": 96,
}  # fmt: skip
USUAL_SIDE = 224
STANDARD_MODELS = ("yolov2-front", "yolov2", "resnet18", "mobilenetv2", "unet32")
STANDARD_CLUSTERS = ("2xpi3", "4xpi3", "6xpi3", "4xpi4")
STANDARD_BATCHES = (1, 6)
HALF_SIDES = {("unet32", 6): 256}
"""Six images of U-Net at 512 would be five minutes of one device's computing for each step."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training step to race in."""

    model: str
    side: int
    batch: int
    on: str
    threads: int = 0
    """Of a device, shared by its processes; 0: as many as its share of this machine has cores."""
    processes: int = 1
    """In each device, for those who spread work."""

    @classmethod
    def of(
        cls,
        model: str,
        *,
        on: str,
        batch: int,
        side: int | None = None,
        threads: int = 0,
        processes: int = 1,
    ) -> Case:
        """With the size of input that the model is usually trained at, if none is given."""
        for what, value in (("--batch", batch), ("--size", 1 if side is None else side)):
            if value < 1:
                raise UsageError(f"{what} {value}: give at least 1")
        if threads < 0 or processes < 1 or (threads or processes) % processes:
            raise UsageError(
                f"--threads {threads} --processes {processes}: give at least one thread to each "
                "process, and to all the same number, such as --threads 4 --processes 2"
            )
        side = side or SIDES.get(model, USUAL_SIDE)
        return cls(
            model, side, batch, on, threads or (processes if processes > 1 else 0), processes
        )

    @property
    def title(self) -> str:
        images = "image" if self.batch == 1 else "images"
        title = f"{self.model} {self.side}x{self.side}, {self.batch} {images}, on {self.on}"
        if not self.threads:
            return title
        made = [_count(self.processes, "process", "processes")]
        made.append(_count(self.threads // self.processes, "thread", "threads"))
        return f"{title}, {' of '.join(made)} a device"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Case:
        return cls(**body)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def standard_cases() -> list[Case]:
    """Every model on six devices; the whole sweep of clusters for the first."""
    return [
        Case.of(model, on=on, batch=batch, side=HALF_SIDES.get((model, batch)))
        for model in STANDARD_MODELS
        for on in STANDARD_CLUSTERS
        for batch in STANDARD_BATCHES
        if model == STANDARD_MODELS[0] or on == "6xpi3"
    ]


def parse_batches(text: str) -> list[int]:
    """``1,6``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"--batch {text} is not understood: give numbers of images, such as 1,6")
    return list(dict.fromkeys(map(int, words)))


def shares(batch: int, devices: int) -> list[range]:
    """Which images each device takes where whole images are spread; the first get more."""
    base, rest = divmod(batch, devices)
    sizes = [base + (device < rest) for device in range(devices)]
    starts: Sequence[int] = [sum(sizes[:device]) for device in range(devices)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

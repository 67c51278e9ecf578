"""What the demo trains, as handed to the devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from terrazzo.records import document

KIND, VERSION = "demo-job", 1


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A training of the small detector on synthetic pictures; sizes in pixels."""

    steps: int
    size: int
    batch: int
    pictures: int
    seed: int
    learning_rate: float

    def write(self, folder: Path) -> None:
        document.write(folder / "job.json", document.dump(KIND, VERSION, asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> DemoJob:
        body = document.parse((folder / "job.json").read_text(encoding="utf-8"), KIND, VERSION)
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})

"""One check as handed to the devices: a folder with the job, its report and its errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from terrazzo.records import document

KIND, VERSION = "check-job", 1


@dataclass(frozen=True, slots=True)
class CheckJob:
    """What the command line asked for, in the words it used."""

    model: str
    inputs: tuple[str, ...]
    layout: str | None
    groups: str | None
    training: bool
    seed: int
    tolerance: float

    def write(self, folder: Path) -> None:
        document.write(folder / "job.json", document.dump(KIND, VERSION, asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> CheckJob:
        body = document.parse((folder / "job.json").read_text(encoding="utf-8"), KIND, VERSION)
        return cls(
            model=body["model"],
            inputs=tuple(body["inputs"]),
            layout=body["layout"],
            groups=body["groups"],
            training=body["training"],
            seed=body["seed"],
            tolerance=body["tolerance"],
        )

    @staticmethod
    def report_path(folder: Path) -> Path:
        return folder / "report.json"

    @staticmethod
    def error_path(folder: Path, device: int) -> Path:
        return folder / f"error-{device}.txt"

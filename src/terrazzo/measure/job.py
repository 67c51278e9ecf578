"""A measuring job as handed to the devices: a folder with the model, the answer and the errors."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.records import Graph, document

KIND, VERSION = "measure-job", 2
CPU = "cpu"
TORCH_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
MARK = "@measure "
READY = "ready"


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """Who measures, for how long at most, and where nets lie, by torch's names for it.

    A memory limit of 0 is not known.
    """

    names: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    budget_s: float
    lie_on: tuple[str, ...]

    def write(self, folder: Path, graph: Graph) -> None:
        document.write(folder / "job.json", document.dump(KIND, VERSION, asdict(self)))
        document.write(folder / "graph.json", graph.to_json())

    @classmethod
    def read(cls, folder: Path) -> tuple[MeasureJob, Graph]:
        body = document.parse((folder / "job.json").read_text(encoding="utf-8"), KIND, VERSION)
        graph = Graph.from_json((folder / "graph.json").read_text(encoding="utf-8"))
        limits = tuple(map(int, body["memory_bytes"]))
        names, lie_on = tuple(body["names"]), tuple(body["lie_on"])
        return cls(names, limits, float(body["budget_s"]), lie_on), graph


def parse_lie_on(text: str, devices: int) -> tuple[str, ...]:
    """``"cuda"`` for every device, or one for each: ``"cpu,cuda:0,cuda:1"``."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not TORCH_DEVICE.fullmatch(part):
            raise UsageError(f"--device {part}: say cpu, cuda, or a GPU by number, such as cuda:1")
    if len(parts) not in (1, devices):
        raise UsageError(f"--device {text} names {len(parts)}, there are {devices} devices")
    return tuple(parts * devices if len(parts) == 1 else parts)


def go_path(folder: Path) -> Path:
    """The sign that lets devices begin: they have started up, and run at their own speed now."""
    return folder / "go"


def answer_path(folder: Path) -> Path:
    return folder / "answer.json"


def error_path(folder: Path, device: int) -> Path:
    return folder / f"error-{device}.txt"

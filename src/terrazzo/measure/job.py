"""A measuring job as handed to the devices: a folder with the model, the answer and the errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from terrazzo.records import Graph, document

KIND, VERSION = "measure-job", 1
MARK = "@measure "
READY = "ready"


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """Who measures, for how long at most; a memory limit of 0 is not known."""

    names: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    budget_s: float

    def write(self, folder: Path, graph: Graph) -> None:
        document.write(folder / "job.json", document.dump(KIND, VERSION, asdict(self)))
        document.write(folder / "graph.json", graph.to_json())

    @classmethod
    def read(cls, folder: Path) -> tuple[MeasureJob, Graph]:
        body = document.parse((folder / "job.json").read_text(encoding="utf-8"), KIND, VERSION)
        graph = Graph.from_json((folder / "graph.json").read_text(encoding="utf-8"))
        limits = tuple(map(int, body["memory_bytes"]))
        return cls(tuple(body["names"]), limits, float(body["budget_s"])), graph


def go_path(folder: Path) -> Path:
    """The sign that lets devices begin: they have started up, and run at their own speed now."""
    return folder / "go"


def answer_path(folder: Path) -> Path:
    return folder / "answer.json"


def error_path(folder: Path, device: int) -> Path:
    return folder / f"error-{device}.txt"

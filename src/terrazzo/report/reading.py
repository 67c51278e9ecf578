"""A reading: everything that a run folder tells, whole or cut off in the middle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from terrazzo.errors import UsageError
from terrazzo.records import Graph, Plan
from terrazzo.records.comparison import Comparison
from terrazzo.records.detections import Detections
from terrazzo.records.event import Event, read_events
from terrazzo.records.prediction import Prediction
from terrazzo.records.run import Run, RunFolder
from terrazzo.report.curves import curves_of
from terrazzo.report.energy import RunEnergy, energy_of
from terrazzo.report.memory import Memory, memory_of
from terrazzo.report.steps import Step, steps_of
from terrazzo.report.traffic import sent_bytes

ALONE = "alone"
"""The folder, inside a run's own, of the same script on one device."""

MOST_EVENT_BYTES = 64 << 20
"""Events beyond this are sampled: a report must fit into memory, whatever the run."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Reading:
    """The records of one run; what is missing is None or empty."""

    path: Path
    run: Run | None
    events: tuple[Event, ...]
    plan: Plan | None = None
    graph: Graph | None = None
    alone: Reading | None = None
    comparison: Comparison | None = None
    detections: Detections | None = None
    prediction: Prediction | None = None

    @classmethod
    def open(cls, path: Path) -> Reading:
        """Reads a run folder; one that holds no run is refused."""
        folder = RunFolder(path)
        if not path.is_dir():
            raise UsageError(f"there is no run folder {path}; terrazzo run and demo make them")
        run = folder.read()
        if run is None and not any(path.glob("events-*.jsonl")):
            raise UsageError(
                f"{path} is no run folder: it has no run.json and no events; give one such as "
                "runs/20260131-142530-train"
            )
        inner = path / ALONE
        return cls(
            path=path,
            run=run,
            events=_events(path),
            plan=_record(path / "plan.json", Plan.from_json),
            graph=_record(path / "graph.json", Graph.from_json),
            alone=cls.open(inner) if (inner / "run.json").is_file() else None,
            comparison=_record(path / "comparison.json", Comparison.from_json),
            detections=_record(path / "detections.json", Detections.from_json),
            prediction=_record(path / "prediction.json", Prediction.from_json),
        )

    @property
    def title(self) -> str:
        return self.path.resolve().name

    @cached_property
    def devices(self) -> int:
        if self.run is not None:
            return self.run.devices
        numbers = (re.search(r"\d+", path.name) for path in self.path.glob("events-*.jsonl"))
        return max((int(found.group()) + 1 for found in numbers if found), default=1)

    @cached_property
    def curves(self) -> dict[str, dict[int, float]]:
        """By name, the numbers that the script logged, by step."""
        return curves_of(self.events)

    @property
    def losses(self) -> Mapping[int, float]:
        return self.curves.get("loss", {})

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return steps_of(self.events, self.devices)

    @cached_property
    def settled(self) -> tuple[Step, ...]:
        """The steps to measure: the first one warms up."""
        whole = tuple(step for step in self.steps if step.is_whole)
        return whole[1:] or whole

    @cached_property
    def plan_changes(self) -> tuple[int, ...]:
        """The calls after which the run went on by another plan."""
        marks = {e.call for e in self.events if e.kind == "note" and e.name == "plan"}
        return tuple(sorted(marks))

    @property
    def planned_steps(self) -> tuple[Step, ...]:
        """The settled steps of the last plan."""
        last = max(self.plan_changes, default=0)
        return tuple(step for step in self.settled if step.call > last)

    @cached_property
    def step_s(self) -> float:
        """The median time of a training step, from one start to the next; NaN: none is known."""
        times = sorted(step.seconds for step in self.settled)
        return times[len(times) // 2] if times else math.nan

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        return memory_of(self.events, self.devices)

    @cached_property
    def energy(self) -> RunEnergy | None:
        """Of the settled steps; None: nothing was told."""
        return energy_of(self.events, self.settled, devices=self.devices, samples=self._samples)

    @property
    def _samples(self) -> int:
        """The batch of a step; 0: not known."""
        names = [name for name in self.graph.inputs if name] if self.graph else []
        shapes = [self.graph.shape(name) for name in names] if self.graph else []
        return next((shape[0] for shape in shapes if shape), 0)

    @cached_property
    def sent_bytes(self) -> dict[int, dict[str, float]]:
        """Per device and kind, the payload of a step on average."""
        return sent_bytes(self.events, self.settled, self.devices)

    @cached_property
    def loss_gaps(self) -> dict[int, float]:
        """Per step, how far the loss is from that of one device, relatively."""
        if self.alone is None:
            return {}
        others = self.alone.losses
        return {
            step: _gap(loss, others[step]) for step, loss in self.losses.items() if step in others
        }


def _events(path: Path) -> tuple[Event, ...]:
    """All events; of a very long run the notes, the first steps and pairs of later ones."""
    size = sum(file.stat().st_size for file in path.glob("events-*.jsonl"))
    every = -(-size // MOST_EVENT_BYTES)
    return tuple(
        event
        for event in read_events(path)
        if every <= 1 or event.kind == "note" or event.call <= 20 or event.call % (2 * every) < 2
    )


def _gap(one: float, other: float) -> float:
    if math.isnan(one) and math.isnan(other):
        return 0.0
    return abs(one - other) / max(abs(other), 1e-300)


def _record(path: Path, read: Callable[[str], Record]) -> Record | None:
    """A record that may be missing; one that is there and wrong is said to be."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged ({error!r}): remove it, or record again") from error


def newest(parent: Path) -> Path:
    """The latest run folder under ``parent``."""
    found = [path.parent for path in parent.glob("*/run.json")]
    if not found:
        raise UsageError(f"there are no runs in {parent}; make one with terrazzo demo")
    return max(found, key=lambda path: (path.stat().st_mtime, path.name))

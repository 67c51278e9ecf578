"""A turn: one peer's processes on all devices, once, with the meters read between its phases."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.bench.cases import Case
from terrazzo.cluster import Hosts, launch
from terrazzo.cluster.process import Failure
from terrazzo.lab.hosts import LabHosts
from terrazzo.records import document
from terrazzo.records.units import bytes_text

MARK = "@race "
PHASES = ("ready", "built", "begin", "end")
ALARM = -14


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of a turn are told."""

    case: Case
    peer: str
    devices: int
    folder: Path
    seconds: float
    limit_s: float
    alone_on: int | None = None
    choice: int | None = None
    keep_gradients: bool = False

    def sign(self, phase: str) -> Path:
        """The file that lets devices go on."""
        return self.folder / f"go-{phase}"

    def to_json(self) -> str:
        body = {**asdict(self), "case": self.case.to_dict(), "folder": str(self.folder.resolve())}
        return document.dump("race-job", 1, body)

    @classmethod
    def from_json(cls, text: str) -> Job:
        body = document.parse(text, "race-job", 1)
        del body["terrazzo"], body["version"]
        case = Case.from_dict(body.pop("case"))
        return cls(case=case, folder=Path(body.pop("folder")), **body)


def gradient_file(job: Job, device: int) -> Path:
    return job.folder / f"gradients-{device}.pt"


@dataclass(slots=True)
class Turn:
    """What came of it; ``problem`` says why not."""

    problem: str = ""
    step_s: list[float] = field(default_factory=list)
    choice: int | None = None
    choice_word: str = ""
    idle_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    sent_bytes: list[float] | None = None
    """For one step, by device; none where nothing counts them."""


def take_turn(job: Job, hosts: Hosts) -> Turn:
    """Starts the peer on all devices and lets it go from phase to phase."""
    job.folder.mkdir(parents=True)
    path = job.folder / "job.json"
    document.write(path, job.to_json())
    command = [sys.executable, "-m", "terrazzo.bench.worker", str(path.resolve())]
    lab = hosts if isinstance(hosts, LabHosts) else None
    killed = [lab.usage(device).killed for device in range(job.devices)] if lab else []
    with ExitStack() as fast:
        if lab is not None:
            fast.enter_context(lab.full_speed())
        referee = _Referee(job, lab, slow_down=fast.close)
        result = launch(command, hosts, output=referee.line, grace_s=3.0)
    if result.failure is not None:
        referee.turn.problem = _problem(job, lab, result.failure, killed, referee.last_error)
    return referee.turn


class _Referee:
    """Reads what devices say, and the meters when all have said it."""

    def __init__(self, job: Job, lab: LabHosts | None, *, slow_down: Callable[[], None]) -> None:
        self.job = job
        self.lab = lab
        self.slow_down = slow_down
        self.turn = Turn()
        self.last_error = ""
        self.said: dict[str, dict[int, dict[str, Any]]] = {phase: {} for phase in PHASES}
        self.sent: list[int] = []
        self.by_group = lab is not None

    def line(self, device: int, text: str) -> None:
        if not text.startswith(MARK):
            if text.strip() and "Error" in text:
                self.last_error = text.strip()
            return
        facts = json.loads(text[len(MARK) :])
        said = self.said[facts["phase"]]
        said[device] = facts
        if len(said) == self.job.devices:
            getattr(self, "_" + facts["phase"])(said)
            self.job.sign(facts["phase"]).touch()

    def _ready(self, said: dict[int, dict[str, Any]]) -> None:
        self.turn.idle_bytes = [
            self.lab.usage(device).memory_bytes if self.lab else facts.get("rss_bytes", 0)
            for device, facts in sorted(said.items())
        ]

    def _built(self, said: dict[int, dict[str, Any]]) -> None:
        self.slow_down()

    def _begin(self, said: dict[int, dict[str, Any]]) -> None:
        if self.lab:
            renewed = [self.lab.reset_peak(device) for device in said]
            self.by_group = all(renewed)
            self.sent = self._counters(self.lab)

    def _end(self, said: dict[int, dict[str, Any]]) -> None:
        turn = self.turn
        facts = said[self.job.alone_on or 0]
        turn.step_s, turn.choice = facts["seconds"], facts["choice"]
        turn.choice_word = facts["choice_word"]
        if self.lab is None:
            turn.peak_bytes = [facts.get("peak_bytes", 0) for _, facts in sorted(said.items())]
            return
        turn.peak_bytes = [self.lab.usage(device).peak_bytes for device in sorted(said)]
        pairs = zip(self._counters(self.lab), self.sent, strict=True)
        turn.sent_bytes = [(after - before) / len(turn.step_s) for after, before in pairs]

    def _counters(self, lab: LabHosts) -> list[int]:
        return [lab.traffic(device).sent_bytes for device in range(self.job.devices)]


def _problem(
    job: Job, lab: LabHosts | None, failure: Failure, killed: list[int], last_error: str
) -> str:
    """Why a peer could not do it, in one line."""
    if lab is not None:
        for device, before in enumerate(killed):
            usage = lab.usage(device)
            if usage.killed > before:
                limit = bytes_text(usage.limit_bytes)
                return f"out of memory: {lab.names[device]} has {limit}"
    if failure.status == ALARM:
        return f"not done within {job.limit_s:g} s"
    lines = [line for line in failure.last_lines if "Error" in line]
    said = (lines or [last_error or failure.reason])[-1]
    return f"{failure.name}: {' '.join(said.split())[:200]}"

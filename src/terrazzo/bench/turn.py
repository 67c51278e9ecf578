"""A turn: one peer's processes on its devices, once, with the meters read between its phases."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.bench.cases import Case
from terrazzo.bench.seats import Seats
from terrazzo.cluster import launch
from terrazzo.cluster.process import Failure
from terrazzo.lab.hosts import LabHosts
from terrazzo.records import document
from terrazzo.records.units import bytes_text

MARK = "@race "
READY, BEGIN, END = "ready", "begin", "end"
ALARM = -14
SETTLING_S = 0.7
"""After links are slow again: connections that were idle for a while find out how fast they are.
Otherwise the first messages of a measured step overrun the queue of a link, and are sent twice."""
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""How the last lines of a traceback begin."""
Facts = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of a turn are told."""

    case: Case
    peer: str
    workers: int
    folder: Path
    seconds: float
    """Of measured steps; at least one step."""
    patience_s: float
    """No further choice is tried after this."""
    limit_s: float
    choice: int | None = None
    keep_gradients: bool = False

    def sign(self, phase: str) -> Path:
        """The file that lets processes go on."""
        return self.folder / f"go-{phase}"

    def to_json(self) -> str:
        body = {**asdict(self), "case": self.case.to_dict(), "folder": str(self.folder.resolve())}
        return document.dump("race-job", 2, body)

    @classmethod
    def from_json(cls, text: str) -> Job:
        body = document.parse(text, "race-job", 2)
        del body["terrazzo"], body["version"]
        case = Case.from_dict(body.pop("case"))
        return cls(case=case, folder=Path(body.pop("folder")), **body)


def gradient_file(job: Job, device: int) -> Path:
    return job.folder / f"gradients-{device}.pt"


@dataclass(frozen=True, slots=True)
class Trial:
    """Measured steps of one choice; memory and traffic by device."""

    step_s: list[float]
    choice: int
    choice_text: str
    peak_bytes: list[int]
    sent_bytes: list[float] | None
    """For one step; none where nothing counts them."""


@dataclass(slots=True)
class Turn:
    """What came of it; ``problem`` says why not."""

    problem: str = ""
    idle_bytes: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: min(trial.step_s))


def take_turn(job: Job, seats: Seats, *, threads: int = 0, core_part: float = 1.0) -> Turn:
    """Starts the peer and lets it go from phase to phase.

    ``threads`` are those of a process, 0 for what its host gives; ``core_part`` is what the turn
    gets of a device's compute rate.
    """
    began_s = time.monotonic()
    job.folder.mkdir(parents=True)
    path = job.folder / "job.json"
    document.write(path, job.to_json())
    command = [sys.executable, "-m", "terrazzo.bench.worker", str(path.resolve())]
    lab = seats.hosts if isinstance(seats.hosts, LabHosts) else None
    killed = [lab.usage(device).killed for device in seats.devices] if lab else []
    with ExitStack() as after:
        if lab is not None and core_part < 1:
            after.enter_context(lab.slowed(core_part))
        referee = _Referee(job, seats, lab)
        after.callback(referee.full_speed.close)
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        result = launch(command, seats, output=referee.line, env=env, grace_s=3.0)
    turn = referee.turn
    if result.failure is not None and not turn.trials:  # else a choice that was too much for it
        turn.problem = _problem(job, seats, lab, result.failure, killed, referee.last_error)
    elif not turn.trials:
        turn.problem = "it ended before a step was measured"
    turn.took_s = time.monotonic() - began_s
    return turn


class _Referee:
    """Reads what processes say, and the meters when all have said it."""

    def __init__(self, job: Job, seats: Seats, lab: LabHosts | None) -> None:
        self.job = job
        self.seats = seats
        self.lab = lab
        self.turn = Turn()
        self.last_error = ""
        self.said: dict[str, Facts] = {}
        self.sent: list[int] = []
        self.by_group = lab is not None
        """Whether the device's control group tells its memory, or its processes do."""
        self.idle: Facts = {}
        self.full_speed = ExitStack()
        self._speed_up()

    def line(self, device: int, text: str) -> None:
        if not text.startswith(MARK):
            if ERROR.match(_said(text)):
                self.last_error = _said(text)
            return
        facts = json.loads(text[len(MARK) :])
        phase = facts["phase"]
        said = self.said.setdefault(phase, {})
        said[device] = facts
        if len(said) == self.job.workers:
            {READY: self._ready, BEGIN: self._begin, END: self._end}[phase.split("-")[0]](said)
            self.job.sign(phase).touch()

    def _speed_up(self) -> None:
        if self.lab is not None:
            self.full_speed.enter_context(self.lab.full_speed(links=True))

    def _ready(self, said: Facts) -> None:
        self.idle = said
        self.turn.idle_bytes = self._by_device(said, "rss_bytes")
        if self.lab is not None:
            self.turn.idle_bytes = [self.lab.usage(d).processes_bytes for d in self.seats.devices]

    def _begin(self, said: Facts) -> None:
        self.full_speed.close()
        if self.lab is not None:
            time.sleep(SETTLING_S)
            renewed = [self.lab.reset_peak(device) for device in self.seats.devices]
            self.by_group = all(renewed)
            if not self.by_group:
                self.turn.idle_bytes = self._by_device(self.idle, "rss_bytes")
            self.sent = self._counters(self.lab)

    def _end(self, said: Facts) -> None:
        facts, sent = said[0], None
        peaks = self._by_device(said, "peak_bytes")
        if self.lab is not None:
            if self.by_group:
                peaks = [self.lab.usage(d).processes_peak_bytes for d in self.seats.devices]
            pairs = zip(self._counters(self.lab), self.sent, strict=True)
            sent = [(after - before) / len(facts["seconds"]) for after, before in pairs]
        trial = Trial(facts["seconds"], facts["choice"], facts["choice_text"], peaks, sent)
        self.turn.trials.append(trial)
        self._speed_up()  # also for the processes' end, which would take long on a slow device

    def _by_device(self, said: Facts, what: str) -> list[int]:
        places = self.seats.places
        return [
            sum(facts[what] for index, facts in said.items() if places[index] == device)
            for device in self.seats.devices
        ]

    def _counters(self, lab: LabHosts) -> list[int]:
        return [lab.traffic(device).sent_bytes for device in self.seats.devices]


def _problem(
    job: Job,
    seats: Seats,
    lab: LabHosts | None,
    failure: Failure,
    killed: list[int],
    last_error: str,
) -> str:
    """Why a peer could not do it, in one line."""
    if lab is not None:
        for device, before in zip(seats.devices, killed, strict=True):
            usage = lab.usage(device)
            if usage.killed > before:
                limit = bytes_text(usage.limit_bytes)
                return f"out of memory: {lab.names[device]} has {limit}"
    if failure.status == ALARM:
        return f"not done within {job.limit_s:g} s"
    lines = [_said(line) for line in failure.last_lines]
    named = [index for index, line in enumerate(lines) if ERROR.match(line)]
    said = " ".join(lines[named[-1] :]) if named else last_error or failure.reason
    return f"{failure.name}: {' '.join(said.split())[:200]}"


def _said(line: str) -> str:
    """A line without torch's mark of who said it."""
    return re.sub(r"^\[rank\d+\]: ?", "", line)

"""A race: every peer trains the same step on the same devices, in turns, round after round.

Devices hold one peer at a time, in fresh processes: with all of them alive, the memory limits of
small devices would be met by processes that wait. Taking turns in rounds keeps a slow minute of
this machine from falling on one peer alone. Every peer gets one turn; more as long as time is left.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.bench import gradients, peers
from terrazzo.bench.cases import Case
from terrazzo.bench.peers.peer import NEXT
from terrazzo.bench.peers.terrazzo import Terrazzo
from terrazzo.bench.planned import Drawing, Planned
from terrazzo.bench.record import Race, Row
from terrazzo.bench.seats import Seats
from terrazzo.bench.truth import Truth, Truths
from terrazzo.bench.turn import Job, Turn, take_turn
from terrazzo.cluster import Hosts
from terrazzo.errors import TerrazzoError
from terrazzo.lab.hosts import LabHosts
from terrazzo.records.units import seconds_text


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a race is."""

    budget_s: float = 300.0
    """For everything. Every peer's first turn comes before it."""
    rounds: int = 3
    """At most."""
    seconds: float = 6.0
    """Of measured steps in one turn; at least one step."""
    limit_s: float = 300.0
    """A turn longer than this is ended."""


@dataclass(slots=True)
class _Entry:
    """A peer while the race goes on."""

    peer: peers.Peer
    seats: Seats
    turns: list[Turn] = field(default_factory=list)
    problem: str = ""
    gap: float | None = None
    noise: float = 0.0
    planned: Planned | None = None

    @property
    def open_layout(self) -> str | None:
        """The layout that it is planned for, if it takes part and is."""
        takes_part = not self.problem
        return self.peer.open_layout if takes_part and isinstance(self.peer, Terrazzo) else None

    @property
    def asked(self) -> str:
        """What devices are told to run."""
        if self.planned is None:
            return self.peer.name
        return f"plan {NEXT.join(str(one.path) for one in self.planned.choices)}"

    @property
    def taken(self) -> Planned | None:
        """Of the plans that were tried the one that the race is run by."""
        return self.planned and self.planned.choices[self.turns[0].best.choice]

    @property
    def next_s(self) -> float:
        """What another turn would take: no choice is tried again then."""
        last = self.turns[-1]
        return last.took_s * (len(last.trials) + 1) / (2 * len(last.trials))

    def row(self) -> Row:
        claims, name = self.peer.claims_exact, self.peer.name
        if self.problem:
            return Row(name, claims, problem=self.problem)
        best, planned = [turn.best for turn in self.turns], self.taken
        return Row(
            name,
            claims,
            step_s=tuple(second for trial in best for second in trial.step_s),
            choice=best[0].choice_text if planned is None else planned.text,
            idle_bytes=tuple(self.turns[-1].idle_bytes),
            peak_bytes=tuple(map(max, zip(*(trial.peak_bytes for trial in best), strict=True))),
            sent_bytes=None if best[-1].sent_bytes is None else tuple(best[-1].sent_bytes),
            gap=self.gap,
            noise=self.noise,
            predicted_s=None if planned is None else planned.prediction.step_s,
            predicted_bytes=() if planned is None else planned.prediction.memory_bytes,
        )


def hold_race(
    case: Case,
    hosts: Hosts,
    names: Sequence[str],
    *,
    rules: Rules,
    scratch: Path,
    say: Callable[[str], None],
    truths: Truths,
) -> Race:
    """Runs all peers on the hosts; in ``scratch`` the profile and the plans made by it are left."""
    began_s, devices = time.monotonic(), len(hosts.names)
    rates = _rates(hosts)
    entries = [_enter(case, name, hosts, rates.index(max(rates))) for name in names]
    say(f"{case.title}: plain PyTorch's gradients, to compare with")
    truth = truths.of(case)
    with tempfile.TemporaryDirectory(prefix=".race-", dir=scratch) as made:
        clock = _Clock(rules, began_s)
        if any(entry.open_layout for entry in entries):
            say("measuring the devices, then planning")
            _plan(entries, lambda: Drawing(case, hosts, scratch, race_s=rules.budget_s))
        for number in range(rules.rounds):
            running = [entry for entry in entries if not entry.problem]
            for place, entry in enumerate(running):
                if number and entry.next_s > clock.left_s:
                    continue
                waiting = running[place:]
                say(f"round {number + 1}, {entry.peer.name}: {clock.text(waiting, number)}")
                patience_s = clock.left_s / len(waiting) / 2  # the last choice may be the longest
                folder = Path(made) / f"{number}-{place}"
                job = _job(case, entry, folder, patience_s=patience_s, rules=rules)
                _run(entry, job, truth)
    rows = [entry.row() for entry in entries]
    strength = sum(rates) / max(rates)
    return Race(case, devices, strength, tuple(rows), isinstance(hosts, LabHosts))


@dataclass(frozen=True, slots=True)
class _Clock:
    rules: Rules
    began_s: float

    @property
    def left_s(self) -> float:
        return self.began_s + self.rules.budget_s - time.monotonic()

    def text(self, waiting: Sequence[_Entry], number: int) -> str:
        """How long it may still take; rounds to come are known from those that were."""
        left_s = max(0.0, self.left_s)
        if number:
            more = self.rules.rounds - number - 1
            known_s = sum(entry.next_s * (1 + more) for entry in waiting)
            return f"about {seconds_text(round(min(left_s, known_s)))} left"
        if left_s == 0:
            return f"over its time, {len(waiting)} to go"
        return f"{len(waiting)} to go, at most {seconds_text(round(left_s))}"


def _enter(case: Case, name: str, hosts: Hosts, lead: int) -> _Entry:
    """One who works alone gets the fastest device, and one process."""
    peer = peers.find(name)
    if peer.alone:
        return _Entry(peer, Seats(hosts, [lead]), problem=peer.can(case, 1) or "")
    seats = Seats(hosts, range(len(hosts.names)), processes=case.processes)
    return _Entry(peer, seats, problem=peer.can(case, len(seats.places)) or "")


def _plan(entries: Sequence[_Entry], draw: Callable[[], Drawing]) -> None:
    """Measures the devices and plans; what nothing can be planned for is a row that says so."""
    drawing: Drawing | None = None
    for entry in entries:
        if isinstance(entry.peer, Terrazzo) and (layout := entry.open_layout):
            try:
                drawing = drawing or draw()
                entry.planned = drawing.plan(layout, entry.peer.groups)
            except TerrazzoError as error:
                entry.problem = f"no plan: {error}"


def _job(case: Case, entry: _Entry, folder: Path, *, patience_s: float, rules: Rules) -> Job:
    first = not entry.turns
    another = len(entry.turns) == 1 and bool(entry.turns[0].best.choice)
    return Job(
        case=case,
        peer=entry.asked,
        workers=len(entry.seats.places),
        folder=folder,
        seconds=rules.seconds,
        patience_s=patience_s,
        limit_s=rules.limit_s,
        choice=None if first else entry.turns[0].best.choice,
        keep_gradients=first or another,
    )


def _run(entry: _Entry, job: Job, truth: Truth) -> None:
    one_core = entry.peer.name == peers.ONE_CORE
    threads = 1 if one_core else job.case.threads // entry.seats.processes
    part = 1 / job.case.threads if one_core else 1.0
    turn = take_turn(job, entry.seats, threads=threads, core_part=part)
    entry.problem = turn.problem
    if not turn.problem:
        entry.turns.append(turn)
        if job.keep_gradients:
            entry.gap = gradients.worst_gap(gradients.load(job.folder), truth.gradients)
            entry.noise = truth.noise
    shutil.rmtree(job.folder)


def _rates(hosts: Hosts) -> list[float]:
    if isinstance(hosts, LabHosts):
        return [device.flops_per_s for device in hosts.topology.devices]
    return [1.0] * len(hosts.names)

"""A race: every peer trains the same step on the same devices, in turns, round after round.

Devices hold one peer at a time, in fresh processes: with all of them alive, the memory limits of
small devices would be met by processes that wait. Taking turns in rounds keeps a slow minute of
this machine from falling on one peer alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from terrazzo.bench import gradients, peers
from terrazzo.bench.cases import Case
from terrazzo.bench.record import Race, Row
from terrazzo.bench.truth import Truth
from terrazzo.bench.turn import Job, Turn, take_turn
from terrazzo.cluster import Hosts
from terrazzo.lab.hosts import LabHosts

LONG_STEP_S = 20.0
"""A step longer than this is measured in the first round only: rounds are for short ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a race is."""

    rounds: int = 2
    seconds: float = 6.0
    """Of measured steps in one turn; at least one step."""
    limit_s: float = 300.0
    """A turn longer than this is ended."""


@dataclass(slots=True)
class _Entry:
    """A peer while the race goes on."""

    peer: peers.Peer
    turns: list[Turn] = field(default_factory=list)
    problem: str = ""
    gap: float | None = None
    noise: float = 0.0

    @property
    def goes_on(self) -> bool:
        last = self.turns[-1].step_s if self.turns else [0.0]
        return not self.problem and max(last) < LONG_STEP_S

    def row(self, workers: Sequence[int]) -> Row:
        claims, name = self.peer.claims_exact, self.peer.name
        if self.problem:
            return Row(name, claims, problem=self.problem)
        last = self.turns[-1]
        sent = last.sent_bytes
        return Row(
            name,
            claims,
            step_s=tuple(second for turn in self.turns for second in turn.step_s),
            choice=f"{last.choice} {last.choice_word}" if last.choice_word else "",
            idle_bytes=tuple(last.idle_bytes[worker] for worker in workers),
            peak_bytes=tuple(max(t.peak_bytes[w] for t in self.turns) for w in workers),
            sent_bytes=None if sent is None else tuple(sent[worker] for worker in workers),
            gap=self.gap,
            noise=self.noise,
        )


def hold_race(
    case: Case,
    hosts: Hosts,
    names: Sequence[str],
    *,
    rules: Rules,
    scratch: Path,
    say: Callable[[str], None],
) -> Race:
    """Runs all peers on the hosts and gives what was measured; ``scratch`` is left empty."""
    devices = len(hosts.names)
    rates = _rates(hosts)
    lead = rates.index(max(rates))
    entries = [_Entry(peers.find(name)) for name in names]
    with tempfile.TemporaryDirectory(prefix=".race-", dir=scratch) as made:
        folder = Path(made)
        say(f"{case.title}: plain PyTorch's gradients, to compare with")
        truth = Truth.of(case)
        for entry in entries:
            entry.problem = entry.peer.can(case, devices) or ""
        for number in range(rules.rounds):
            for entry in entries:
                if entry.goes_on:
                    say(f"{case.title}: round {number + 1} of {rules.rounds}, {entry.peer.name}")
                    job = _job(case, entry, folder / f"{number}-{entries.index(entry)}", rules)
                    _run(entry, _placed(job, entry, devices, lead), hosts, truth)
    rows = [entry.row([lead] if entry.peer.alone else range(devices)) for entry in entries]
    strength = sum(rates) / max(rates)
    return Race(case, devices, strength, tuple(rows), isinstance(hosts, LabHosts))


def _job(case: Case, entry: _Entry, folder: Path, rules: Rules) -> Job:
    first = not entry.turns
    return Job(
        case=case,
        peer=entry.peer.name,
        devices=1,
        folder=folder,
        seconds=rules.seconds,
        limit_s=rules.limit_s,
        choice=None if first else entry.turns[0].choice,
        keep_gradients=first,
    )


def _placed(job: Job, entry: _Entry, devices: int, lead: int) -> Job:
    return replace(job, devices=devices, alone_on=lead if entry.peer.alone else None)


def _run(entry: _Entry, job: Job, hosts: Hosts, truth: Truth) -> None:
    turn = take_turn(job, hosts)
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

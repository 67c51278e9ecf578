"""Lifetimes: when arrays can go, and which are computed again before the backward pass.

A group with passes keeps what enters it. What it made inside goes as soon as the forward pass has
read it, comes back when the backward pass reaches the group, and goes for good behind it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from terrazzo.schedule.program import Combine, Passes, Program, Step


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A step to run again, if the backward pass reaches any of those that read its result."""

    step: int
    target: str
    reads: frozenset[str]
    readers: frozenset[str]


class Lifetimes:
    """Lists of arrays to drop, by step, for both directions."""

    def __init__(self, program: Program) -> None:
        steps, results = program.steps, frozenset(program.outputs.values())
        last = {name: index for index, step in enumerate(steps) for name in step.reads}
        made = {step.target: i for i, step in enumerate(steps) if isinstance(step, Passes)}
        again = _read_again(program)
        inner = {
            name
            for name, index in made.items()
            if name in again
            and all(_group(steps[reader]) == _group(steps[index]) for reader in again[name])
        }
        self.kept = frozenset(again) - inner
        """What must not change between the forward and the backward pass."""
        self.exports = [
            frozenset(n for n in step.writes if last.get(n, -1) > index or n in results)
            for index, step in enumerate(steps)
        ]
        """What each step makes that later steps or the caller read."""
        self.forward_drops: list[list[str]] = [[] for _ in steps]
        self.last_drops: list[list[str]] = [[] for _ in steps]
        self.backward_drops: list[list[str]] = [[] for _ in steps]
        self.rebuilt_before: list[list[Rebuilt]] = [[] for _ in steps]
        for name, index in last.items():
            if name not in results:
                self.last_drops[index].append(name)
                if name not in again or name in inner:
                    self.forward_drops[index].append(name)
        for name, readers in again.items():
            self.backward_drops[min(readers)].append(name)
        for group in {_group(steps[index]) for index in made.values()}:
            end = max(index for index, step in enumerate(steps) if _group(step) == group)
            self.rebuilt_before[end] = [
                Rebuilt(
                    index,
                    name,
                    frozenset(steps[index].reads),
                    frozenset(_target(steps[reader]) for reader in again[name]),
                )
                for name, index in made.items()
                if name in inner and _group(steps[index]) == group
            ]

    def rebuilt(self, index: int, live: Set[str]) -> list[int]:
        """The steps to run again before the backward of a step, and what those read in turn."""
        chosen: list[int] = []
        wanted: set[str] = set()
        for candidate in reversed(self.rebuilt_before[index]):
            if candidate.readers & live or candidate.target in wanted:
                chosen.append(candidate.step)
                wanted |= candidate.reads
        return chosen[::-1]


def _read_again(program: Program) -> dict[str, list[int]]:
    """The arrays that backward passes of groups with passes read, and the steps that do."""
    found: dict[str, list[int]] = {}
    for index, step in enumerate(program.steps):
        names: Sequence[str] = ()
        if isinstance(step, Passes):
            names = step.reads
        elif isinstance(step, Combine) and step.reduction.combine == "moments":
            names = step.inputs if program.plan.groups[step.group].passes else ()
        for name in names:
            found.setdefault(name, []).append(index)
    return found


def _group(step: Step) -> int:
    """The group of a step that a backward pass may need arrays for."""
    return step.group if isinstance(step, (Passes, Combine)) else -1


def _target(step: Step) -> str:
    assert isinstance(step, (Passes, Combine))
    return step.target

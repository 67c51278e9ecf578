"""Passes under a memory limit: where groups end, so that a step fits and little is computed twice.

With passes, a group keeps what enters it and rebuilds the rest when the backward pass comes. Long
groups keep little and rebuild much; while one is rebuilt, all of it is in memory, so groups that
are too long are no help either. Walking forward over the arrays of a program, a state is (bytes
kept so far, operations to repeat so far); only states that no other beats in both are followed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import ceil, prod

from terrazzo.errors import PlanError
from terrazzo.planner.explicit import with_borders
from terrazzo.records import Graph, Plan
from terrazzo.records.units import bytes_text
from terrazzo.schedule import Combine, Exchange, Passes, Program, lower
from terrazzo.schedule.ledger import IDLE, Footprint
from terrazzo.schedule.memory import footprints
from terrazzo.schedule.passes import is_heavy
from terrazzo.schedule.training import EVERYTHING, Training

PASSES = (4, 16, 64)
"""Numbers of strips to try, from fast to small."""

MIB = 1 << 20
ATTEMPTS = 6
"""How often the limit of the search is lowered by what the walk finds it missed."""

WAITING = 20
"""Arithmetic that fits into the time one element takes to come from memory, about."""


def needed(graph: Graph, plan: Plan, *, training: Training = EVERYTHING) -> Footprint:
    """The largest footprint among the devices of a plan."""
    feet = footprints(lower(graph, plan), training=training)
    return max(feet, key=lambda found: found.total_bytes)


@dataclass(frozen=True, slots=True)
class Tightest:
    """The device that misses its limit by most, or comes closest to it."""

    device: int
    foot: Footprint
    limit_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.foot.total_bytes - self.limit_bytes


def tightest(
    graph: Graph, plan: Plan, limits: Sequence[int], *, training: Training = EVERYTHING
) -> Tightest:
    """Where a plan is held against the limits of its devices."""
    feet = footprints(lower(graph, plan), training=training)
    found = (Tightest(d, *pair) for d, pair in enumerate(zip(feet, limits, strict=True)))
    return max(found, key=lambda found: found.missing_bytes)


def fit(
    graph: Graph,
    plan: Plan,
    limits: int | Sequence[int],
    *,
    names: Sequence[str] = (),
    training: Training = EVERYTHING,
) -> Plan:
    """The plan itself if it fits, else one with passes in the same layouts that repeats least.

    ``limits``: one for all devices, or one for each.
    """
    limits = (limits,) * plan.devices if isinstance(limits, int) else limits
    plain = tightest(graph, plan, limits, training=training)
    if plain.missing_bytes <= 0:
        return plan
    for passes in PASSES:
        search = _Search(graph, plan, passes, limits=limits, training=training)
        found = search.within()
        if found is not None:
            return found
    last = search.smallest()
    smallest = tightest(graph, last, limits, training=training)
    if smallest.missing_bytes <= 0:
        return last
    least = min(plain, smallest, key=lambda found: found.missing_bytes)
    raise _too_much(plan, plain, least, names, is_own=len(set(limits)) > 1)


def smallest_plan(graph: Graph, plan: Plan, *, training: Training = EVERYTHING) -> list[Plan]:
    """The plan with passes that need the least memory, in few strips and in many."""
    none = (0,) * plan.devices
    return [
        _Search(graph, plan, passes, limits=none, training=training).smallest()
        for passes in PASSES[1:]
    ]


class TooLittleMemory(PlanError):
    """No passes make a plan fit. ``told`` is what is missing, without what to do about it, which
    depends on whose limit it is: one that was given, or a device's own memory."""

    def __init__(self, told: str, remedies: Sequence[str], missing_bytes: int) -> None:
        super().__init__(f"{told} Try {', '.join(remedies[:-1])} or {remedies[-1]}.")
        self.told, self.missing_bytes = told, missing_bytes


def _too_much(
    plan: Plan, whole: Tightest, least: Tightest, names: Sequence[str], *, is_own: bool
) -> TooLittleMemory:
    """``is_own``: whether devices have limits of their own."""
    plain, smallest, limit_bytes = whole.foot, least.foot, least.limit_bytes
    where = names[least.device] if names else f"device {least.device}"
    states = ""
    if smallest.states_bytes:
        states = f"the optimiser's state {bytes_text(smallest.states_bytes)}, "
    parts = (
        f"weights and their gradients {bytes_text(smallest.weights_bytes)} + "
        f"{bytes_text(smallest.weight_gradients_bytes)}, {states}maps and their gradients "
        f"{bytes_text(smallest.maps_bytes + smallest.map_gradients_bytes)} at {smallest.where}"
    )
    more = "more devices" if plan.devices > 1 else "several devices"
    enough = f'memory="{ceil(smallest.total_bytes / MIB)}MiB"'
    if is_own:
        enough += f" for {where}"
    told = (
        f"a training step needs at least {bytes_text(smallest.total_bytes)} on {where}, limit "
        f"{bytes_text(limit_bytes)} ({parts}; without passes {bytes_text(plain.total_bytes)})."
    )
    return TooLittleMemory(told, (enough, "smaller inputs", more), least.missing_bytes)


@dataclass(frozen=True, slots=True)
class _Item:
    """An array that groups keep or rebuild, with the items that read it in the backward pass."""

    end: str
    size: int
    flops: int
    first: int
    last: int
    live: bool
    """Whether a gradient goes through it."""
    lasts: tuple[int, ...]
    """The last that reads it as it was made, and the last that reads it as it was sent on: where
    these are in other groups, each keeps its own."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of items as one group: bytes kept behind it, operations repeated, bytes in memory at
    its backward pass, and how many of those no other end would spare."""

    kept: int
    repeated: int
    least: int
    alive: int


@dataclass(frozen=True, slots=True)
class _State:
    """Everything up to an item decided: bytes kept, operations repeated, and the way here."""

    kept: int
    repeated: int
    before: tuple[_State, int] | None = None

    def ends(self) -> list[int]:
        found, state = [], self
        while state.before is not None:
            state, end = state.before
            found.append(end)
        return found[::-1]


class _Search:
    """Group borders for one number of passes."""

    def __init__(
        self, graph: Graph, plan: Plan, passes: int, *, limits: Sequence[int], training: Training
    ) -> None:
        self.graph, self.passes, self.limits, self.training = graph, passes, limits, training
        heavy = [index for index, node in enumerate(graph.nodes) if is_heavy(node, graph)]
        self.each = with_borders(graph, plan, heavy, passes)
        most = self._tightest(self.each)
        self.base = most.foot
        program = lower(graph, self.each)
        self.items = _items(program, most.device, training.live(program))
        self.flows = _flows(self.items)
        self._runs: dict[tuple[int, int], _Run] = {}

    def within(self) -> Plan | None:
        """A plan that fits, by the search and by the walk."""
        budget = self._tightest(self.each).limit_bytes
        for _ in range(ATTEMPTS):
            ends = self._borders(self._room(budget))
            if ends is None:
                return None
            plan = self._plan(ends)
            excess = self._tightest(plan).missing_bytes
            if excess <= 0:
                return plan
            budget -= excess
        return None

    def smallest(self) -> Plan:
        """The borders that need the least room, to a hundredth or so."""
        high = 2 * sum(item.size for item in self.items)
        low, ends = 0, [item.end for item in self.items]
        while high - low > high // 100 + 1:
            middle = (low + high) // 2
            found = self._borders(middle)
            low, high = (middle, high) if found is None else (low, middle)
            ends = found or ends
        return self._plan(ends)

    def _tightest(self, plan: Plan) -> Tightest:
        return tightest(self.graph, plan, self.limits, training=self.training)

    def _plan(self, ends: Sequence[str]) -> Plan:
        nodes = [self.graph.producer[end] for end in ends]
        return with_borders(self.graph, self.each, nodes, self.passes)

    def _room(self, budget: int) -> int:
        """What is left for arrays and their gradients."""
        base = self.base
        passing_bytes = base.passing_bytes
        lasting_bytes = base.total_bytes - int((1 + IDLE) * passing_bytes)
        left = int((budget - lasting_bytes) / (1 + IDLE))
        return left - base.weight_gradients_bytes - base.working_bytes

    def _borders(self, room: int) -> list[str] | None:
        """The ends of groups that repeat least within the room; None if nothing fits."""
        count = len(self.items)
        fronts: list[list[_State]] = [[] for _ in range(count + 1)]
        fronts[0] = [_State(0, 0)]
        for start in range(count):
            states = _unbeaten(fronts[start])
            for end in range(start, count):
                run = self._run(start, end)
                if not states or states[0].kept + run.least > room:
                    break
                fronts[end + 1] += [
                    _State(state.kept + run.kept, state.repeated + run.repeated, (state, end))
                    for state in states
                    if state.kept + run.alive <= room
                ]
        found = min(_unbeaten(fronts[count]), key=lambda state: state.repeated, default=None)
        return [self.items[end].end for end in found.ends()] if found else None

    def _run(self, start: int, end: int) -> _Run:
        """What a group from one item to another keeps, repeats and needs."""
        if (start, end) not in self._runs:
            inside = self.items[start : end + 1]
            # What lies behind the last that gradients reach is made once: layers that are frozen.
            reached = max((place for place, item in enumerate(inside, 1) if item.live), default=0)
            again = inside[:reached]
            self._runs[start, end] = _Run(
                kept=sum(item.size for item in inside for last in item.lasts if last > end),
                repeated=sum(item.flops for item in again if 0 <= item.last <= end),
                least=sum(item.size for item in again[: end - start] if item.last >= 0),
                alive=max(
                    self.flows[now] + sum(item.size for item in again if 0 <= item.first <= now)
                    for now in range(start, end + 1)
                ),
            )
        return self._runs[start, end]


def _unbeaten(states: Sequence[_State]) -> list[_State]:
    """Those that no other state beats in both, fewest bytes first."""
    found: list[_State] = []
    for state in sorted(states, key=lambda one: (one.kept, one.repeated)):
        if not found or state.repeated < found[-1].repeated:
            found.append(state)
    return found


def _items(program: Program, device: int, live: Set[str]) -> list[_Item]:
    """The arrays that passes make on one device, in order."""
    readers: dict[str, tuple[list[int], list[int]]] = {}
    origin: dict[str, str] = {}
    made, group = 0, -1
    for step in program.steps:
        if isinstance(step, Exchange):
            origin |= {move.target: move.source for move in step.moves}
        elif isinstance(step, (Passes, Combine)):
            # Statistics that end a group belong to what it made last.
            reader = made - 1 if isinstance(step, Combine) and step.group == group else made
            for name in step.reads:
                source = origin.get(name, name)
                readers.setdefault(source, ([], []))[name in origin].append(reader)
        if isinstance(step, Passes):
            made, group = made + 1, step.group
    found = []
    for step in program.steps:
        if isinstance(step, Passes):
            boxes = program.arrays[step.target].boxes
            assert boxes is not None
            value = program.graph.values[program.arrays[step.target].value]
            share = boxes[device].size / max(prod(value.shape), 1)
            kinds = [
                [min(reader, made - 1) for reader in kind]
                for kind in readers.get(step.target, ())
                if kind
            ]
            again = [reader for kind in kinds for reader in kind]
            found.append(
                _Item(
                    end=step.target,
                    size=int(value.bytes * share),
                    flops=int(share * sum(_work(program, index) for index in step.nodes)),
                    first=min(again, default=-1),
                    last=max(again, default=-1),
                    live=step.target in live,
                    lasts=tuple(map(max, kinds)),
                )
            )
    return found


def _work(program: Program, index: int) -> int:
    """The operations of a node; cheap ones wait for memory, and count for more than they do."""
    node = program.graph.nodes[index]
    return node.flops * (1 if is_heavy(node, program.graph) else WAITING)


def _flows(items: Sequence[_Item]) -> list[int]:
    """The bytes of gradients that are alive while the backward pass is at each item."""
    return [
        sum(item.size for item in items[:now] if item.live and item.last >= now)
        + (items[now].size if items[now].live else 0)
        for now in range(len(items))
    ]

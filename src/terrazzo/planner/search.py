"""The search: which runs of operators become groups, and how each is spread over the devices.

Places where a group may end are numbered. Going forward over them, the best way to reach a place
in a layout is the best way to reach an earlier place in some layout, plus moving what crosses that
place from one layout to the other, plus the run between in the new one:

    best(end, layout) = min over begin, before:  best(begin, before)
                                                 + moving(begin, before -> layout)
                                                 + run(begin .. end, layout)

Sums of weight gradients run beside computing, so how much of them is felt depends on the rest of
the plan. The search is made several times, with these sums at several prices between nothing and
all; the plans it finds, and every uniform one, are then simulated as a whole, and the best is
improved step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from terrazzo.errors import PlanError
from terrazzo.geometry import Box
from terrazzo.planner.borders import ends, longest_run, norm_behind
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import group_title, plan_graph, regrouped
from terrazzo.planner.improve import Changes, anything, improved, joined, merged, only_borders
from terrazzo.planner.layouts import alone, candidates
from terrazzo.planner.limits import limited, smallest, spread_limit, within
from terrazzo.planner.prediction import Prediction
from terrazzo.planner.prices import Prices, speeds
from terrazzo.planner.stretch import HIDDEN, Ground, Numbers, Stretch, corners, price, results
from terrazzo.records import Graph, Group, Layout, Plan
from terrazzo.records.profile import Profile
from terrazzo.records.units import count_text
from terrazzo.schedule import lower
from terrazzo.schedule.training import EVERYTHING, Training

FELT = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Parts of the sums of weight gradients that a search takes as felt."""
EVALUATIONS = 1200
"""Nodes simulated while improving: small models can be tried more often."""
STARTS = 3
"""Plans that are improved step by step; each gets half as many trials as the one before."""
SURE = 0.9
"""Of the time of all on every device: what a plan must promise that spreads work, and may err."""
TIME, MEMORY, ENERGY = "time", "memory", "energy"
"""What shall be least; energy is chosen together with devices and modes (planner.thrift)."""
BORDERS, FEWER = ("each", "auto", "one"), 5
"""Other borders for the layouts of the best plan, and how many with one less: the first ones, where
maps are large."""
LONGEST = 4
"""Layouts that the name of a plan tells."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was simulated as a whole."""

    name: str
    plan: Plan
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan, and what else was looked at, best first."""

    best: Tried
    rejected: tuple[Tried, ...]
    refused: tuple[str, ...] = ()
    """Plans that do not fit into the memory limit, in words."""
    misfit: str = ""
    """Why no plan fits into what the devices have, and what would; the best is too large then."""


@dataclass
class Bench:
    """Plans of one graph simulated on one cluster, each once."""

    graph: Graph
    prices: Prices
    memory: bool = False
    """Whether memory is counted too, which takes as long as all the rest."""
    seen: dict[tuple[Group, ...], Tried] = field(default_factory=dict)

    def try_(self, name: str, plan: Plan) -> Tried:
        groups = tuple(plan.groups)
        if groups not in self.seen:
            program = lower(self.graph, plan)
            found = predict(program, self.prices, memory=self.memory)
            self.seen[groups] = Tried(name, plan, found)
        return self.seen[groups]


def search(
    graph: Graph,
    profile: Profile,
    *,
    memory_bytes: int | Sequence[int] | None = None,
    objective: str = TIME,
    delivered: int = 0,
    training: Training = EVERYTHING,
    layout: Layout | None = None,
) -> Found:
    """The plan with the least predicted time (or memory) for all devices of a profile.

    ``memory_bytes`` is the limit of each device, or one for all. The plan with the least memory
    takes at most half as long again as the fastest. ``delivered`` and ``training`` are as in
    ``Prices``. With a ``layout``, only the borders of groups are looked for.
    """
    if not graph.nodes:
        raise PlanError("the model has no operators: there is nothing to plan")
    counted = memory_bytes is not None or objective == MEMORY
    prices = Prices(profile, delivered=delivered, training=training)
    bench = Bench(graph, prices, counted)
    devices, speed = len(profile.devices), speeds(profile)
    if devices == 1:
        whole = Layout.tiles(1, 1) if _pictures(graph) else Layout()
        plans = {"one device": plan_graph(graph, 1, layout=whole, groups="auto")}
    else:
        layouts = candidates(graph, speed) if layout is None else [layout]
        plans = _everywhere(graph, devices, layout) if layout else _uniform(graph, speed, layouts)
        plans |= _searched(graph, Prices(profile, classes=True, training=training), layouts)
    tried = list({t.plan: t for t in (bench.try_(n, tidy(p)) for n, p in plans.items())}.values())
    limits = spread_limit(memory_bytes, devices)
    fits = limited(bench, tried, limits)
    small = smallest(bench, fits.kept) if objective == MEMORY else fits.kept
    best = min(small, key=_order(objective))
    if devices > 1 and objective == TIME:
        changes = anything(layouts) if layout is None else only_borders(graph)
        best = _improved(bench, fits.kept, changes, limits)
        fits.kept.extend(_other_borders(bench, best, limits))
        best = _surely_faster(min(best, *fits.kept, key=_order(TIME)), fits.kept)
    best = replace(best, prediction=_with_memory(bench, best))
    others = {t.plan: t for t in reversed(fits.kept) if t.plan != best.plan}
    rest = sorted(others.values(), key=_order(objective))
    return Found(best, tuple(rest), fits.refused)


def _improved(
    bench: Bench, kept: Sequence[Tried], changes: Changes, limits: Sequence[int] | None
) -> Tried:
    """The best of what becomes of the best few."""
    order = _order(TIME)
    starts = sorted(kept, key=order)[:STARTS]
    plain = [t for t in starts if not any(group.passes for group in t.plan.groups)]
    rounds = EVALUATIONS // (len(bench.graph.nodes) * bench.prices.devices // 4 + 1)
    ends = [
        improved(
            start,
            bench.try_,
            changes,
            limits=limits,
            evaluations=max(4, rounds >> place),
        )
        for place, start in enumerate(plain)
    ]
    best = min([*starts, *ends], key=order)
    return best if best in kept else replace(best, name=described(best.plan))


def _other_borders(bench: Bench, best: Tried, limits: Sequence[int] | None) -> list[Tried]:
    """The layouts of the best with as many borders as there can be, with as few, and with one less.

    Step by step the first may be out of reach, where one border changes next to nothing. The last
    are those from which the best differs least, so only steps tell which is faster.
    """
    if any(group.passes for group in best.plan.groups):
        return []
    plans = [tidy(regrouped(bench.graph, best.plan, groups)) for groups in BORDERS]
    plans += islice(merged(best.plan), FEWER)
    # Where one was a step of the way to the best it has the name of where that began.
    tried = [replace(bench.try_("", plan), name=described(plan)) for plan in plans]
    return [t for t in tried if within(t.prediction.memory_bytes, limits)]


def _surely_faster(best: Tried, kept: Sequence[Tried]) -> Tried:
    """All on every device sends nothing, and holds what it promises: others must promise more."""
    surest = next((t for t in kept if all(g.layout.is_whole for g in t.plan.groups)), best)
    return best if best.prediction.step_s < SURE * surest.prediction.step_s else surest


def _with_memory(bench: Bench, best: Tried) -> Prediction:
    if best.prediction.memory_bytes:
        return best.prediction
    return predict(lower(bench.graph, best.plan), bench.prices)


def _order(objective: str) -> Callable[[Tried], tuple[float, float]]:
    def order(tried: Tried) -> tuple[float, float]:
        found = tried.prediction
        most = float(max(found.memory_bytes, default=0))
        return (found.step_s, most) if objective == TIME else (most, found.step_s)

    return order


# ---- plans -------------------------------------------------------------------------------------


def _pictures(graph: Graph) -> bool:
    return any(name and len(graph.shape(name)) == 4 for name in graph.inputs)


def _everywhere(graph: Graph, devices: int, layout: Layout) -> dict[str, Plan]:
    """One layout, exchanging at every operator, at those that need halos, and never."""
    return {
        f"{layout} {groups}": plan_graph(graph, devices, layout=layout, groups=groups)
        for groups in ("each", "auto", "one")
    }


def _uniform(graph: Graph, speed: Sequence[float], layouts: Sequence[Layout]) -> dict[str, Plan]:
    """One layout for the whole model; one device for everything; all of it on every device.

    The last is plain PyTorch several times over, so no plan that is chosen is slower than that.
    """
    only, devices = alone(speed), len(speed)
    found = {
        "one device alone": plan_graph(graph, devices, layout=only, groups="one"),
        "all on every device": plan_graph(graph, devices, layout="whole", groups="one"),
    }
    if not _pictures(graph):
        return found
    for layout in layouts:
        idle = any(0 in cut for _, cut in layout.cuts)
        mixed = len(set(layout.letters) - {"w"}) > 1
        if not (layout.is_whole or idle or mixed):
            plan = plan_graph(graph, devices, layout=layout, groups="auto")
            found[f"{layout} everywhere"] = plan
    return found


def _searched(graph: Graph, prices: Prices, layouts: Sequence[Layout]) -> dict[str, Plan]:
    if not _pictures(graph):
        return {}
    walk = Walk(graph, prices, layouts)
    found: dict[str, Plan] = {}
    for felt in FELT:
        plan = walk.plan(felt)
        for one in dict.fromkeys((plan, walk.with_norms_first(plan))):
            if one not in found.values():
                name = described(one)
                taken = sum(other.startswith(name) for other in found)
                found[f"{name}, variant {taken + 1}" if taken else name] = one
    return found


def described(plan: Plan) -> str:
    """The layouts in their order: ``tiles:3x2, then channels:6, in 5 groups``."""
    layouts = [str(group.layout) for group in plan.groups]
    runs = [one for place, one in enumerate(layouts) if not place or layouts[place - 1] != one]
    if len(runs) > LONGEST:
        runs = [*runs[: LONGEST - 1], f"{len(runs) - LONGEST} more", runs[-1]]
    return f"{', then '.join(runs)}, in {count_text(len(layouts), 'group')}"


class Walk:
    """All places and layouts of one graph, priced; the cheapest ways through them."""

    def __init__(self, graph: Graph, prices: Prices, layouts: Sequence[Layout]) -> None:
        self.graph, self.layouts = graph, list(layouts)
        self.ground = Ground(graph, prices)
        self.ends = ends(graph)
        inner = self.ground.graph
        shown = [graph.nodes[end].output for end in self.ends]
        self.places = [inner.producer[name] for name in shown[:-1]] + [len(inner.nodes) - 1]
        self.reach = longest_run(len(self.ends))
        self._runs: dict[tuple[int, int, int], Stretch] = {}
        self._moves: dict[tuple[int, int, int], list[float]] = {}
        self._have: dict[str, Numbers] = {}
        self._prepare()

    def _prepare(self) -> None:
        for stop in range(len(self.places)):
            for start in range(max(0, stop - self.reach + 1), stop + 1):
                first = self.places[start - 1] + 1 if start else 0
                for number, layout in enumerate(self.layouts):
                    run = price(self.ground, layout, first=first, last=self.places[stop])
                    self._runs[start, stop, number] = run
                    if start:
                        self._moves[start, stop, number] = self._moving(run)
                        if self._meets_once(start - 1, number):
                            self._moves[start, stop, number][number] -= 2 * self.ground.met_s

    def _meets_once(self, stop: int, number: int) -> bool:
        """Whether a border inside a layout can be where edges and statistics travel together."""
        cut = not set(self.layouts[number].letters).isdisjoint("hw")
        return cut and self._norm_behind(self.ends[stop]) is not None

    def _norm_behind(self, end: int) -> int | None:
        return norm_behind(self.graph, self.ground.norms, end)

    def with_norms_first(self, plan: Plan) -> Plan:
        """The same plan with borders inside a tiled layout moved before the norms."""
        groups = list(plan.groups)
        begin = 0
        for place, group in enumerate(groups):
            end = self.graph.producer[group.last]
            following = groups[place + 1].layout if place + 1 < len(groups) else None
            if following == group.layout and not set(group.layout.letters).isdisjoint("hw"):
                found = self._norm_behind(end)
                end = end if found is None or found < begin else found
            title = group_title(self.graph, begin, end)
            groups[place] = replace(group, last=self.graph.nodes[end].output, title=title)
            begin = end + 1
        return replace(plan, groups=tuple(groups))

    def _moving(self, run: Stretch) -> list[float]:
        """Seconds to bring what enters a run, by the layout before it."""
        ground = self.ground
        total = np.zeros(len(self.layouts))
        if ground.prices.network is None:
            return [0.0] * len(self.layouts)
        for name, boxes in run.enters:
            live = name in ground.carries
            value = ground.graph.values[name]
            whole = (Box.whole(value.shape),) * ground.prices.devices
            need = corners(whole if boxes is None else boxes)
            if name not in self._have:
                tiles = [corners(ground.tiles(name, one)) for one in self.layouts]
                self._have[name] = np.stack(tiles)
            have = self._have[name]
            sizes = ground.volumes(have, need[None]) * ground.size(name)
            seconds = ground.moved_s(sizes)
            if live and boxes is not None:
                back = ground.moved_s(sizes.swapaxes(-1, -2))
                seconds = seconds + back - np.minimum(HIDDEN * back, run.late_s)
            for number, before in enumerate(self.layouts):
                if before.is_whole:  # all have all of it; parts of its gradient are summed
                    felt = ground.prices.joint_s(value.bytes)
                    felt -= min(HIDDEN * felt, run.late_s)
                    seconds[number] = felt if live and boxes is not None else 0.0
            total += seconds
        found: list[float] = total.tolist()
        return found

    def plan(self, felt: float) -> Plan:
        """The cheapest way, with a part of the sums of weight gradients taken as felt."""
        count, stops = len(self.layouts), len(self.places)
        best = [[float("inf")] * count for _ in range(stops)]
        back: list[list[tuple[int, int] | None]] = [[None] * count for _ in range(stops)]
        for stop in range(stops):
            for start in range(max(0, stop - self.reach + 1), stop + 1):
                for number in range(count):
                    run = self._runs[start, stop, number]
                    cost, origin = run.work_s + felt * run.sums_s, None
                    if start:
                        moves, before = self._moves[start, stop, number], best[start - 1]
                        ways = [old + move for old, move in zip(before, moves, strict=True)]
                        origin = (start - 1, min(range(count), key=ways.__getitem__))
                        cost += ways[origin[1]]
                    if cost < best[stop][number]:
                        best[stop][number], back[stop][number] = cost, origin
        last = [c + self._ending_s(n) for n, c in enumerate(best[-1])]
        return self._traced(back, min(range(count), key=last.__getitem__))

    def _ending_s(self, number: int) -> float:
        """Every device gets the results."""
        layout, ground = self.layouts[number], self.ground
        if layout.is_whole or ground.prices.network is None:
            return 0.0
        total = 0.0
        for name in results(ground.graph):
            producer = ground.graph.producer.get(name)
            roles = ground.mask(layout.letters)[1]
            if producer is None or roles[producer].role in ("whole", "reduce"):
                continue
            whole = (Box.whole(ground.graph.shape(name)),) * ground.prices.devices
            have = corners(ground.tiles(name, layout))
            sizes = ground.volumes(have, corners(whole)) * ground.size(name)
            total += float(ground.moved_s(sizes))
        return total

    def _traced(self, back: Sequence[Sequence[tuple[int, int] | None]], number: int) -> Plan:
        stop, groups = len(self.places) - 1, []
        while True:
            origin = back[stop][number]
            begin = self.ends[origin[0]] + 1 if origin else 0
            end = self.ends[stop]
            title = group_title(self.graph, begin, end)
            groups.append(Group(self.graph.nodes[end].output, self.layouts[number], title))
            if origin is None:
                break
            stop, number = origin
        return tidy(Plan(self.graph.digest, self.ground.prices.devices, tuple(groups[::-1])))


def tidy(plan: Plan) -> Plan:
    """Neighbours in one layout as one group, where its border would change nothing.

    Images do not depend on each other, so groups of whole images compute and send the same
    wherever they end.
    """
    groups: list[Group] = []
    for group in plan.groups:
        before = groups[-1] if groups else None
        free = not set(group.layout.letters) - {"n"}
        if before is not None and free and before.layout == group.layout:
            groups[-1] = joined(before, group)
        else:
            groups.append(group)
    return replace(plan, groups=tuple(groups))

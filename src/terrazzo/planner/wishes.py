"""What a user asks of a plan, for any graph of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrazzo.errors import PlanError, UsageError
from terrazzo.planner.explicit import Groups, layout_of, plan_graph
from terrazzo.planner.fitting import TooLittleMemory, fit
from terrazzo.planner.limits import spread_limit, within
from terrazzo.planner.prices import Prices
from terrazzo.planner.rivals import rivals
from terrazzo.planner.search import MEMORY, TIME, Found, Tried, search
from terrazzo.records import Graph, Layout, Plan
from terrazzo.records.machine import SMALL_BYTES
from terrazzo.records.profile import Profile
from terrazzo.records.units import parse_bytes
from terrazzo.schedule.training import EVERYTHING, Training

DELIVERY = {"uint8": 1, "float32": 4, "none": 0}
"""How the input travels from the device that reads it, and the bytes of an element of it."""
IDLE_BYTES, SMALL_IDLE_BYTES = 230 << 20, 176 << 20
"""A process with torch loaded and its connections made, before the first step; on a small device,
where it does without torch's compiler: 155 to 157 MiB were seen, and scripts need a little more."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Layout, groups, passes and memory as given to ``tz.plan`` and ``tz.parallelize``.

    With a profile, what is left open is searched for: layouts and the borders of groups, or these
    borders alone. Without one, open means the grid of tiles with the shortest borders, exchanging
    at every operator.
    """

    layout: str | Layout = "auto"
    groups: Groups = "auto"
    passes: int = 0
    memory: str | int | Sequence[str | int] | None = None
    objective: str = TIME
    profile: Profile | None = None
    delivered: int = 0
    """Bytes of an element of the input on its way from the device that reads; 0: it is not sent."""
    training: Training = EVERYTHING
    """What is known of a step, and no wish: which layers are frozen, and the optimiser."""

    def __post_init__(self) -> None:
        if self.passes < 0:
            raise UsageError(f"passes={self.passes}: say 0 for none, or how many strips")
        if self.memory is not None and (self.passes or self.groups != "auto"):
            raise UsageError(
                "memory= chooses groups and passes by itself: leave groups= and passes= out"
            )
        parse_limits(self.memory)
        if self.objective not in (TIME, MEMORY):
            raise UsageError(f'objective={self.objective!r}: say "{TIME}" or "{MEMORY}"')

    @property
    def is_open(self) -> bool:
        """Whether groups are left to the planner, and layouts, unless one is given."""
        return self.groups == "auto" and not self.passes

    @property
    def memory_bytes(self) -> int | tuple[int, ...] | None:
        """The limit of every device, or one for each."""
        return parse_limits(self.memory)

    def plan(self, graph: Graph, devices: int) -> Plan:
        if self.profile is not None and self.is_open:
            return self.search(graph, devices).best.plan
        if self.objective == MEMORY:
            why = "a profile of the devices" if self.is_open else 'groups="auto" without passes='
            raise UsageError(
                f'objective="{MEMORY}" is searched for: it needs {why} (terrazzo cluster profile '
                'measures them). Without, memory="900MiB" makes a plan fit into so much'
            )
        plan = plan_graph(
            graph, devices, layout=self.layout, groups=self.groups, passes=self.passes
        )
        limits = spread_limit(self.memory_bytes, devices)
        return plan if limits is None else fit(graph, plan, limits, training=self.training)

    def search(self, graph: Graph, devices: int) -> Found:
        """The best plan by the profile, and what else was looked at."""
        assert self.profile is not None
        if len(self.profile.devices) != devices:
            raise PlanError(
                f"the profile is of {len(self.profile.devices)} devices, the plan is for "
                f"{devices}: measure these with terrazzo cluster profile, or plan for those"
            )
        found = self._search(graph, self.profile, self.memory_bytes)
        rooms = rooms_bytes(self.profile)
        if self.memory is None and not within(found.best.prediction.memory_bytes, rooms):
            try:
                return self._search(graph, self.profile, rooms)
            except TooLittleMemory as error:  # the best plan stands, and is seen not to fit
                help_ = "That is what it has beside an idle process: take smaller inputs, another"
                misfit = f"{error.told} {help_} device in its place, or more devices."
                return replace(found, misfit=misfit)
        return found

    def rivals(self, graph: Graph, found: Found) -> tuple[Tried, ...]:
        """Plans that are worth a try beside the one that was found; for the least memory, none."""
        if self.objective != TIME or found.misfit or found.best.plan.devices == 1:
            return ()
        return rivals(graph, found, self.limits_bytes(), training=self.training)

    def boundless(self, graph: Graph) -> Found:
        """The same if devices had all the memory they want."""
        assert self.profile is not None
        return replace(self, memory=None)._search(graph, self.profile, None)

    def prices(self, profile: Profile) -> Prices:
        """What such a step costs on the devices of a profile."""
        return Prices(profile, delivered=self.delivered, training=self.training)

    def limits_bytes(self) -> tuple[int, ...] | None:
        """What a step may take on each device: what was said, or what the profile tells."""
        assert self.profile is not None
        said = spread_limit(self.memory_bytes, len(self.profile.devices))
        return rooms_bytes(self.profile) if said is None else said

    def _search(
        self, graph: Graph, profile: Profile, memory_bytes: int | Sequence[int] | None
    ) -> Found:
        given = layout_of(graph, len(profile.devices), self.layout)
        return search(
            graph,
            profile,
            memory_bytes=memory_bytes,
            objective=self.objective,
            delivered=self.delivered,
            training=self.training,
            layout=None if self.layout == "auto" else given,
        )


def delivered_bytes(delivery: str) -> int:
    """Bytes of an element of the input on its way, by a name of ``DELIVERY``."""
    if delivery not in DELIVERY:
        raise UsageError(f"delivery={delivery!r}: say one of {', '.join(DELIVERY)}")
    return DELIVERY[delivery]


def parse_limits(
    memory: str | int | Sequence[str | int] | None,
) -> int | tuple[int, ...] | None:
    """``"700MiB"`` for every device, or one for each: ``["700MiB", "3GiB"]``, ``"700MiB,3GiB"``."""
    if memory is None or isinstance(memory, int):
        return memory if memory is None else parse_bytes(memory)
    parts = memory.split(",") if isinstance(memory, str) else list(memory)
    found = tuple(parse_bytes(part.strip() if isinstance(part, str) else part) for part in parts)
    return found[0] if len(found) == 1 else found


def rooms_bytes(profile: Profile) -> tuple[int, ...] | None:
    """What a step may take on each device; None: not known.

    A GPU has what was free on it, a CPU what is left beside an idle process.
    """
    known = [
        device.memory_bytes if device.accelerator else room_beside_idle_bytes(device.memory_bytes)
        for device in profile.devices
    ]
    return tuple(known) if all(device.memory_bytes for device in profile.devices) else None


def room_beside_idle_bytes(memory_bytes: int) -> int:
    """What a step may take on a device that has so much."""
    return max(0, memory_bytes - (SMALL_IDLE_BYTES if memory_bytes < SMALL_BYTES else IDLE_BYTES))


def room_bytes(profile: Profile) -> int:
    """The same on the smallest device; 0: not known."""
    return min(rooms_bytes(profile) or (0,))

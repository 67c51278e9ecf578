"""Planning together: device 0 plans with what was measured, and all devices obey its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from terrazzo.errors import PlanError, TerrazzoError, UsageError
from terrazzo.measure.key import MODEL
from terrazzo.measure.store import ProfileStore
from terrazzo.planner import Wishes
from terrazzo.planner.fitting import fit
from terrazzo.planner.retarget import retarget
from terrazzo.records import Graph, Plan
from terrazzo.records.machine import Machine
from terrazzo.records.profile import Profile
from terrazzo.runtime.links import Links

PLANNED, REFUSED = b"P", b"R"


def kept_profile(graph: Graph, devices: int, *, environment: Mapping[str, str]) -> Profile | None:
    """The newest profile of this model on so many devices, measured with this torch."""
    folder, torch = ProfileStore.usual(environment).folder, Machine.here().torch
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            profile = Profile.load(path)
        except UsageError:
            continue  # of another version: measuring again replaces it
        same = (profile.key.get(MODEL), profile.key.get("torch")) == (graph.digest, torch)
        if same and len(profile.devices) == devices:
            found.append(profile)
    return max(found, key=lambda profile: profile.measured_s, default=None)


def informed(
    wishes: Wishes, profile: Profile | str | Path | None, *, graph: Graph, devices: int
) -> Wishes:
    """The wishes with a profile: the one that was given, or one that was kept."""
    if not wishes.is_open or devices == 1:
        return wishes
    if profile is None:
        profile = kept_profile(graph, devices, environment=os.environ)
    elif not isinstance(profile, Profile):
        profile = Profile.load(Path(profile))
    return replace(wishes, profile=profile)


class Planner:
    """Plans of device 0 for every graph that a net meets.

    With a profile, the first plan decides where weights live; other input sizes and modes keep its
    layouts, so that weights can stay where they are.
    """

    def __init__(
        self, links: Links, wishes: Wishes, profile: Profile | str | Path | None = None
    ) -> None:
        self.links, self.wishes, self.profile = links, wishes, profile
        self._first: tuple[Graph, Plan] | None = None

    def __call__(self, graph: Graph) -> Plan:
        """What device 0 plans, on all devices; what it refuses, all refuse."""
        links = self.links
        if links.devices == 1:
            return self._plan(graph)
        data, failure = None, None
        if links.device == 0:
            try:
                data = PLANNED + self._plan(graph).to_json().encode()
            except TerrazzoError as error:
                data, failure = REFUSED + str(error).encode(), error
        data = links.broadcast_bytes(data)
        if data[:1] == REFUSED:
            raise failure or PlanError(data[1:].decode())
        return Plan.from_json(data[1:].decode())

    def _plan(self, graph: Graph) -> Plan:
        devices = self.links.devices
        if self._first is not None:
            plan = retarget(self._first[1], self._first[0], graph)
            limit = self.wishes.memory_bytes
            return plan if limit is None else fit(graph, plan, limit)
        known = informed(self.wishes, self.profile, graph=graph, devices=devices)
        plan = known.plan(graph, devices)
        if known.profile is not None:
            self._first = (graph, plan)
        return plan

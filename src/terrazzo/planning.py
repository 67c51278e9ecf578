"""Planning together: device 0 plans with what was measured, and all devices obey its plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from terrazzo.errors import PlanError, TerrazzoError, UsageError
from terrazzo.measure.accelerator import CPU, title
from terrazzo.measure.key import WHERE
from terrazzo.measure.known import NOWHERE, given_profile, kept_here
from terrazzo.measure.store import ProfileStore
from terrazzo.measure.together import are_apart, measure_together
from terrazzo.planner import Wishes
from terrazzo.planner.cost import predict
from terrazzo.planner.feedback import slowed
from terrazzo.planner.fitting import fit
from terrazzo.planner.prices import Prices
from terrazzo.planner.retarget import retarget
from terrazzo.planner.search import TIME
from terrazzo.planner.wishes import room_beside_idle_bytes
from terrazzo.records import Graph, Layout, Plan, document
from terrazzo.records.layout import AXES
from terrazzo.records.prediction import Prediction
from terrazzo.records.profile import Profile
from terrazzo.records.units import count_text, seconds_text
from terrazzo.runtime.ceiling import ceiling_bytes, is_small
from terrazzo.runtime.links import Links
from terrazzo.runtime.pace import Foreseen
from terrazzo.schedule import lower

PLANNED, DECIDED, REFUSED, WRONG = b"P", b"D", b"R", b"W"
"""A plan for one graph; a plan that other graphs follow, and its rivals; none; a wish that nothing
can mean."""
WORTH = 0.05
"""The part of a step's time that a new plan must save."""
MEASURE, OFF = "TERRAZZO_MEASURE", ("off", "0", "no")
"""Where it is off, nets are planned without measuring: as a grid of tiles."""
MEASURE_S = 20.0
"""At most so long operators are timed; links take a few seconds more."""


def informed(
    wishes: Wishes,
    profile: Profile | None,
    *,
    graph: Graph,
    devices: int,
    accelerators: Mapping[int, str] = NOWHERE,
) -> Wishes:
    """The wishes with a profile: the one that was given, or one that was kept.

    ``accelerators`` are what nets lie on, by device, as far as that is known.
    """
    if not wishes.is_open or (devices == 1 and profile is None):
        return wishes
    return replace(wishes, profile=profile or kept_here(graph, devices, accelerators))


Made = tuple[bytes, tuple[Plan, ...]]
"""The kind of what device 0 has planned, the plan, and its rivals."""


def shipped(links: Links, make: Callable[[], Made]) -> Made:
    """The plans that device 0 makes, and their kind; what it refuses, all refuse."""
    failure, data = None, None
    if links.device == 0:
        try:
            letter, plans = make()
            data = letter + json.dumps([plan.to_json() for plan in plans]).encode()
        except TerrazzoError as error:
            letter = WRONG if isinstance(error, UsageError) else REFUSED
            data, failure = letter + str(error).encode(), error
    data = links.broadcast_bytes(data)
    if data[:1] in (REFUSED, WRONG):
        kind = UsageError if data[:1] == WRONG else PlanError
        raise failure or kind(data[1:].decode())
    return data[:1], tuple(Plan.from_json(text) for text in json.loads(data[1:]))


class Planner:
    """Plans for every graph that a net meets, and what is predicted of the first of them.

    A plan that was given, searched for by a profile or adopted later decides where weights live;
    other input sizes and modes keep its layouts, so that weights can stay where they are. What is
    left open is planned by device 0 for all.
    """

    def __init__(
        self,
        links: Links,
        wishes: Wishes,
        *,
        plan: Plan | None = None,
        profile: Profile | str | Path | None = None,
        measures: bool | None = None,
        torch_device: torch.device = CPU,
        frozen: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """``measures``: whether this device could measure itself. Where there is no profile yet,
        devices on several machines make one, if all could; None: nobody asks. ``torch_device`` is
        what the net of this device lies on, and ``frozen`` tells which of its parameters are
        not trained at the moment."""
        if plan is not None and plan.devices != links.devices:
            raise PlanError(
                f"the plan is for {plan.devices} devices, {links.devices} are here: make one with "
                f"tz.plan(model, (x,), devices={links.devices})"
            )
        self.links, self._wishes, self._frozen = links, wishes, frozen
        self.profile: Profile | None = None
        self._told = profile
        """The profile as it was given; it is read and checked when the first graph is there."""
        self._given, self._measures, self._is_new = plan, measures, False
        self._torch_device = torch_device
        self._accelerators: Mapping[int, str] = NOWHERE
        """What the net of each device lies on; empty until they have told each other."""
        self._first: tuple[Graph, Plan] | None = None
        self._foreseen: Foreseen | None = None
        self._contenders: tuple[Plan, ...] = ()
        self._asleep: frozenset[str] | None = None
        """What was frozen when the plan was made, and in every call since."""

    @property
    def wishes(self) -> Wishes:
        """With what is frozen: not just now, layers may be so for a part of every step."""
        if self._asleep is None:
            self._asleep = self._frozen()
        return replace(self._wishes, training=replace(self._wishes.training, frozen=self._asleep))

    def __call__(self, graph: Graph) -> Plan:
        """The plan of a graph, the same on all devices; what device 0 refuses, all refuse."""
        if self._first is not None:
            first, plan = self._first
            limit = self.wishes.memory_bytes
            if limit is None or graph.digest == first.digest:
                return retarget(plan, first, graph)
            training = self.wishes.training
            return fit(graph, retarget(plan, first, graph), limit, training=training)
        if not self._accelerators:
            told = self.links.gather_text(title(self._torch_device))
            self._accelerators = dict(enumerate(told))
        if self._given is not None:
            plan = self._obeyed(graph, self._given)
        elif not self.wishes.is_open:
            plan = self.wishes.plan(graph, self.links.devices)
        else:
            self._measure(graph)
            plan = self._shipped(graph)
        if self._foreseen is None:
            self._foresee(graph, plan)
        return plan

    def adopt(self, graph: Graph, plan: Plan, *, by_script: bool = True) -> None:
        """From now on this plan, and for other graphs of the model one like it."""
        self._first = (graph, plan)
        if by_script:
            self._contenders, self._asleep = (), self._frozen()
        self._foresee(graph, plan)

    def again(self, slowness: Sequence[float]) -> Plan | None:
        """The plan for devices that compute so many times as long as was thought.

        None where plans are not open, without a profile to search by, or where none fits.
        """
        known = self.foreseen is not None and self.foreseen.compute_s is not None
        if self._first is None or not known or not self.wishes.is_open:
            return None
        try:
            return self._shipped(self._first[0], slowness)
        except (PlanError, UsageError):
            return None  # on all devices: what there is goes on

    def follow(self, kept: Sequence[int | None]) -> None:
        """Plans anew for other devices: the numbers before of those that are left.

        Of layouts by number the kind stays, where there is one kind; else they are left open.
        """
        wishes, old = self.wishes, self._given
        places = [place for place in kept if place is not None]
        memory, passes = wishes.memory_bytes, wishes.passes
        if isinstance(memory, tuple):
            least = min(memory)
            memory = tuple(least if place is None else memory[place] for place in kept)
        if old is not None and memory is None:
            passes = max(passes, *(group.passes for group in old.groups))
        layouts = [wishes.layout] if old is None else [group.layout for group in old.groups]
        if self.profile is None and self._first is not None:
            with suppress(UsageError):  # so far device 0 alone has read it, and may be lost
                self._read(self._first[0])
        kinds = {_kind(layout) for layout in layouts}
        layout = kinds.pop() if len(kinds) == 1 else "auto"
        known = self.profile if len(places) == len(kept) else None
        self.profile, self._told = known and known.of(places), None
        objective = wishes.objective if known else TIME  # which is all there is without a profile
        self._wishes = replace(
            wishes, layout=layout, memory=memory, passes=passes, objective=objective
        )
        self._given = self._first = self._foreseen = None
        self._contenders = ()
        self._accelerators = NOWHERE
        self._measures = None  # who lost a device wants to go on

    @property
    def contenders(self) -> tuple[Plan, ...]:
        """The plan that was searched for and those that promise about as much, until it changes."""
        return self._contenders

    @property
    def foreseen(self) -> Foreseen | None:
        """What was predicted of the first plan, or of the one that was adopted last."""
        return self._foreseen

    def outgrown(self) -> int:
        """How many parameters are trained that the plan was made to be frozen; told once.

        Of a plan that was not searched for, nobody expects that it knows.
        """
        asleep = self.wishes.training.frozen
        self._asleep = asleep & self._frozen()
        is_planned = self.profile is not None or self.wishes.memory is not None
        return len(asleep - self._asleep) if self.wishes.is_open and is_planned else 0

    # ---- plans ---------------------------------------------------------------------------

    def _measure(self, graph: Graph) -> None:
        """Devices that nobody has measured with this model do it now, once: device 0 keeps it."""
        links, agrees = self.links, self._measures
        if links.devices == 1 or agrees is None:
            return
        if links.device == 0 and agrees:
            given = self._told is not None or self.profile is not None
            unknown = not given and self._kept(graph) is None
            agrees = unknown and os.environ.get(MEASURE, "").lower() not in OFF
        if "no" in links.gather_text("yes" if agrees else "no"):
            return
        if not are_apart(links, self._torch_device):
            return
        self._measures = None
        place = os.environ.get(WHERE) or f"{links.devices} devices"
        found = measure_together(
            links,
            graph,
            torch_device=self._torch_device,
            place=place,
            budget_s=MEASURE_S,
            say=self._progress(),
        )
        if isinstance(found, Profile):
            self.profile, self._is_new = found, True
        if links.device == 0:
            self._keep(found)

    def _kept(self, graph: Graph) -> Profile | None:
        return kept_here(graph, self.links.devices, self._accelerators)

    def _progress(self) -> Callable[[str], None]:
        if self.links.device != 0:
            return lambda text: None
        _say(
            f"these devices were not measured with this model yet: that takes about half a minute, "
            f"once, and a plan for them comes of it ({MEASURE}=off leaves it out)"
        )
        return lambda text: _say(f"measuring {text}")

    def _keep(self, found: Profile | str) -> None:
        if isinstance(found, str):
            _say(f"measuring failed ({found}): the plan is a grid of tiles")
            return
        try:
            path = ProfileStore.usual(os.environ).keep(found)
            _say(f"measured, and kept as {path}; planning")
        except (OSError, UsageError) as error:
            _say(f"measured; it could not be kept for the next time: {error}")

    def _obeyed(self, graph: Graph, plan: Plan) -> Plan:
        if graph.digest != plan.graph:
            raise PlanError(
                f"the plan was made for model {plan.graph}, this one (or its example input, "
                f"or its mode) is {graph.digest}: make a plan for it with tz.plan"
            )
        self._first = (graph, plan)
        return plan

    def _shipped(self, graph: Graph, slowness: Sequence[float] = ()) -> Plan:
        """Device 0 plans; its plan or its refusal is everybody's."""
        kind, plans = shipped(self.links, lambda: self._searched(graph, slowness))
        if kind == DECIDED and not slowness:
            self._first, self._contenders = (graph, plans[0]), plans if len(plans) > 1 else ()
        return plans[0]

    def _searched(self, graph: Graph, slowness: Sequence[float]) -> Made:
        devices = self.links.devices
        self._read(graph)
        if slowness:
            assert self.profile is not None, "a plan was predicted by it"
            self.profile = slowed(self.profile, slowness)
        known = informed(
            self.wishes,
            self.profile,
            graph=graph,
            devices=devices,
            accelerators=self._accelerators,
        )
        if known.profile is None:
            on_cpu = self._torch_device.type == CPU.type
            plan = _unmeasured(known, graph, devices) if on_cpu else known.plan(graph, devices)
            return PLANNED, (plan,)
        found = known.search(graph, devices)
        plan = found.best.plan
        if found.misfit:
            _say(f"no plan fits into these devices, the fastest is taken: {found.misfit}")
        if slowness and self._first is not None:
            return DECIDED, (self._better(plan, self._first[1], graph, known.profile),)
        return DECIDED, (plan, *(tried.plan for tried in known.rivals(graph, found)))

    def _better(self, new: Plan, old: Plan, graph: Graph, profile: Profile) -> Plan:
        """A new plan must be worth moving weights for."""
        prices = self.wishes.prices(profile)
        new_s, old_s = (
            predict(lower(graph, plan), prices, memory=False).step_s for plan in (new, old)
        )
        return new if new_s <= (1 - WORTH) * old_s else old

    # ---- predictions ---------------------------------------------------------------------

    def _foresee(self, graph: Graph, plan: Plan) -> None:
        """What device 0 predicts is known to all, so that all judge alike how a run goes."""
        links, data = self.links, None
        if links.device == 0:
            letter: dict[str, Any] = {"compute_s": None}
            try:
                prediction = self._predicted(graph, plan)
                letter["compute_s"] = prediction and prediction.net_compute_s
                if prediction is not None and self._is_new:
                    _say(
                        f"planned: {count_text(len(plan.groups), 'group')} of layers, "
                        f"{seconds_text(prediction.step_s)} a step predicted"
                    )
                self._is_new = False
            except TerrazzoError as error:
                letter["error"], prediction = str(error), None
            if links.recorder is not None:
                self._record(links.recorder.folder, graph, plan, prediction)
            data = json.dumps(letter).encode()
        letter = json.loads(links.broadcast_bytes(data))
        if "error" in letter:
            raise PlanError(letter["error"])
        told = letter["compute_s"]
        self._foreseen = Foreseen(graph.digest, None if told is None else tuple(told))

    def _predicted(self, graph: Graph, plan: Plan) -> Prediction | None:
        self._read(graph)
        devices = self.links.devices
        profile = self.profile or self._kept(graph)
        if profile is None or len(profile.devices) != devices:
            return None
        self.profile = profile
        # Of what net does: the input comes before, and not every script is fed by one device.
        prices = Prices(profile, training=self.wishes.training)
        return predict(lower(graph, plan), prices, memory=self.links.recorder is not None)

    def _read(self, graph: Graph) -> None:
        """The profile that was given, once: graphs that come later are of other sizes."""
        if self._told is not None:
            found = given_profile(self._told, graph, self._accelerators)
            self.profile, self._told = found, None

    def _record(
        self, folder: Path, graph: Graph, plan: Plan, prediction: Prediction | None
    ) -> None:
        """Plan, model, prediction and profile of a run; plans that were left get a number."""
        path = folder / "plan.json"
        try:
            if path.exists():
                number = 1 + sum(1 for _ in folder.glob("plan-*.json"))
                path.replace(folder / f"plan-{number}.json")
            plan.save(path)
            document.write(folder / "graph.json", graph.to_json() + "\n")
            if prediction is not None and self.profile is not None:
                document.write(folder / "prediction.json", prediction.to_json() + "\n")
                self.profile.save(folder / "profile.json")
        except (OSError, UsageError) as error:
            print(f"terrazzo: the plan is not recorded: {error}; training goes on", file=sys.stderr)


def _unmeasured(wishes: Wishes, graph: Graph, devices: int) -> Plan:
    """A plan for devices that are taken to be as small as this one, if it is small."""
    if wishes.memory is None and is_small():
        room_bytes = room_beside_idle_bytes(ceiling_bytes())
        with suppress(PlanError):  # nothing fits: what there is may, it was only counted
            return replace(wishes, memory=room_bytes).plan(graph, devices)
    return wishes.plan(graph, devices)


def _say(text: str) -> None:
    print(f"terrazzo: {text}", file=sys.stderr, flush=True)


def _kind(layout: str | Layout) -> str:
    """A layout for any number of devices that cuts as this one does; the grid of tiles is open."""
    if isinstance(layout, str):
        if layout in ("auto", "tiles", "samples", "channels"):
            return layout
        layout = Layout.parse(layout)
    if layout.is_whole:
        return "whole"
    return AXES[layout.letters] if layout.letters in ("n", "c") else "auto"

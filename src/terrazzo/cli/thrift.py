"""``terrazzo plan --objective energy``: devices, modes and layouts together, on a screen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.errors import UsageError
from terrazzo.planner import Wishes
from terrazzo.planner.search import ENERGY, TIME, Found
from terrazzo.planner.thrift import Thrifty, thrifty
from terrazzo.records import Graph, Plan
from terrazzo.records.devicepower import PlanMode, load_modes
from terrazzo.records.power import IDLE_PART, joules_text, parse_watts, watts_text
from terrazzo.records.profile import Profile
from terrazzo.records.seat import Seat
from terrazzo.records.units import count_text, seconds_text
from terrazzo.report.screen import Screen

AS_IT_IS = "as it comes"


def is_thrifty(options: argparse.Namespace) -> bool:
    """Whether power is asked about at all."""
    return bool(options.objective == ENERGY or options.power_budget)


def modes_of(
    options: argparse.Namespace, profile: Profile, watts: Sequence[float | None]
) -> tuple[tuple[tuple[PlanMode, ...], ...], bool]:
    """Each device's modes, and whether somebody measured them."""
    names = [device.name for device in profile.devices]
    if options.power:
        return load_modes(options.power, names), True
    if all(device.busy_w for device in profile.devices):
        own = [PlanMode(AS_IT_IS, 1.0, d.busy_w, d.idle_w or d.busy_w) for d in profile.devices]
        return tuple((row,) for row in own), all(d.is_metered for d in profile.devices)
    if len(watts) != len(names) or not all(watts):
        raise UsageError(
            "what these devices draw is not known: measure them again with terrazzo cluster "
            "profile, or give --power table.csv, as terrazzo power tune --save writes it there"
        )
    rows = [PlanMode(AS_IT_IS, 1.0, w, IDLE_PART * w) for w in watts if w]
    return tuple((row,) for row in rows), False


def choose(
    graph: Graph,
    wishes: Wishes,
    options: argparse.Namespace,
    *,
    watts: Sequence[float | None],
    screen: Screen,
) -> Thrifty:
    """The thriftiest choice, shown."""
    profile = wishes.profile
    assert profile is not None
    if not wishes.is_open:
        raise UsageError("--objective energy and --power-budget choose groups: leave them open")
    modes, is_measured = modes_of(options, profile, watts)
    plain = replace(wishes, objective=TIME)
    budget_w = parse_watts(options.power_budget) if options.power_budget else None

    def search(part: Profile) -> Found:
        return replace(plain, profile=part).search(graph, len(part.devices))

    best, rest = thrifty(
        graph,
        profile,
        modes,
        search=search,
        objective=ENERGY if options.objective == ENERGY else TIME,
        budget_w=budget_w,
        prices=wishes.prices,
    )
    _show(best, rest, profile=profile, is_measured=is_measured, screen=screen)
    return best


def seated(best: Thrifty, profile: Profile) -> Plan:
    """The plan with the names of its devices and their modes, as it is kept."""
    seats = tuple(
        Seat(profile.devices[place].name, mode.mode, mode.phases)
        for place, mode in zip(best.places, best.modes, strict=True)
    )
    return replace(best.tried.plan, seats=seats)


def _show(
    best: Thrifty,
    rest: Sequence[Thrifty],
    *,
    profile: Profile,
    is_measured: bool,
    screen: Screen,
) -> None:
    mark = "" if is_measured else " (estimated)"
    screen.title(f"Energy of a step: {joules_text(best.step_j)}{mark}")
    screen.line(
        f"{seconds_text(best.step_s)}, {watts_text(best.mean_w)} on average, at most "
        f"{watts_text(best.peak_w)} with all busy."
    )
    for place, mode in zip(best.places, best.modes, strict=True):
        name = profile.devices[place].name
        screen.line(
            f"{name}: {mode.title}; {mode.slowness:.2f} times as long, {watts_text(mode.busy_w)} "
            f"busy, {watts_text(mode.idle_w)} waiting"
        )
    out = [d.name for n, d in enumerate(profile.devices) if n not in best.places]
    if out:
        screen.line(f"Left out, and counted as switched off: {', '.join(out)}.")
    for other in rest:
        count = count_text(len(other.places), "device")
        screen.line(
            f"{count}: {seconds_text(other.step_s)}, {joules_text(other.step_j)} "
            f"({other.step_j / best.step_j:.2f} times as much)",
            "dim",
        )

"""``terrazzo run --plan FILE``: a kept plan for a run, on its devices and in their power modes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from terrazzo.cli.place import Place, say
from terrazzo.cluster.hosts import Hosts, LocalHosts
from terrazzo.errors import UsageError
from terrazzo.records import Plan
from terrazzo.records.seat import Seat

PLAN = "TERRAZZO_PLAN"
"""The variable in which ``terrazzo.init`` finds the plan; the same name as there."""
LARGEST_BYTES = 120_000
"""Of a plan as text: systems let a variable have 128 KiB."""


def read_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {path} cannot be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"--plan {path}: {error}") from error


def environment(plan: Plan, path: Path, *, hosts: Hosts, place: Place) -> dict[str, str]:
    """What hands a plan over to devices, wherever they are."""
    if place.topology is not None and isinstance(hosts, LocalHosts):
        say("nothing is emulated, so the power modes of the plan are left out")
        plan = replace(plan, seats=tuple(Seat(seat.device) for seat in plan.seats))
    text = json.dumps(json.loads(plan.to_json()), separators=(",", ":"))
    if len(text) > LARGEST_BYTES:
        raise UsageError(
            f"--plan {path} has {len(text)} bytes, {LARGEST_BYTES} can be handed over: let the "
            "script read it with tz.Plan.load, and give it to tz.parallelize"
        )
    return {PLAN: text}


def seated(place: Place, plan: Plan, path: Path) -> Place:
    """Where the run is to be, with none but the devices of the plan, in its order."""
    names = tuple(seat.device for seat in plan.seats)
    if place.cluster is not None:
        there = {device.name: device for device in place.cluster.devices}
        if names:
            chosen = tuple(there[name] for name in _known(names, tuple(there), path))
            return replace(place, cluster=replace(place.cluster, devices=chosen))
    elif place.topology is not None:
        boards = {device.name: device for device in place.topology.devices}
        if names:
            picked = tuple(boards[name] for name in _known(names, tuple(boards), path))
            return replace(place, topology=replace(place.topology, devices=picked))
    elif names and plan.devices < place.devices:
        return replace(place, local=LocalHosts(plan.devices))
    if plan.devices != place.devices:
        raise UsageError(
            f"--plan {path} is for {plan.devices} devices, --on names {place.devices}: plan for "
            "these with terrazzo plan --save, or name as many"
        )
    return place


def _known(names: tuple[str, ...], there: tuple[str, ...], path: Path) -> tuple[str, ...]:
    missing = [name for name in names if name not in there]
    if missing:
        raise UsageError(
            f"--plan {path} is for {', '.join(names)}; --on names {', '.join(there)}, so "
            f"{missing[0]} is missing: give the --on that it was planned with"
        )
    return names

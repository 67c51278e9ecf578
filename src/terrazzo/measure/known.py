"""What is known of devices: the profile that was given, or the newest that was kept. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from terrazzo.errors import UsageError
from terrazzo.measure.key import MODEL, PLACE, WHERE, is_current, moved, refuse_other
from terrazzo.measure.store import ProfileStore
from terrazzo.records import Graph
from terrazzo.records.machine import Machine
from terrazzo.records.profile import Profile

NOWHERE: Mapping[int, str] = MappingProxyType({})
"""Nobody has told what nets lie on."""


def kept_profile(
    graph: Graph,
    devices: int,
    *,
    environment: Mapping[str, str],
    place: str = "",
    fits: Callable[[Profile], bool] = lambda profile: True,
) -> Profile | None:
    """The newest profile of this model on so many devices: with this torch, or of that place.

    What another Terrazzo has measured, or this one in another way, counts as not measured.
    ``fits``: whether it is of what nets lie on.
    """
    folder, version = ProfileStore.usual(environment).folder, Machine.here().torch
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            profile = Profile.load(path)
        except UsageError:
            continue  # of another version: measuring again replaces it
        which = profile.key.get(PLACE) == place if place else profile.key.get("torch") == version
        same = profile.key.get(MODEL) == graph.digest and len(profile.devices) == devices
        if which and same and is_current(profile.key) and fits(profile):
            found.append(profile)
    return max(found, key=lambda profile: profile.measured_s, default=None)


def given_profile(
    profile: Profile | str | Path | None,
    graph: Graph,
    accelerators: Mapping[int, str] = NOWHERE,
) -> Profile | None:
    """What a script gave, read; refused where it is of another model, torch or accelerator."""
    if profile is None:
        return None
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    refuse_other(found.key, graph, running=True)
    if MODEL in found.key and (told := moved(found, accelerators)):
        raise UsageError(
            f"the profile is of other processors: {told}. Measure with terrazzo cluster profile "
            "--device, or leave the profile out"
        )
    return found


def kept_here(graph: Graph, devices: int, accelerators: Mapping[int, str]) -> Profile | None:
    """The profile of these devices, as far as a script can know where it runs."""
    place = os.environ.get(WHERE, "")
    found = kept_profile(
        graph,
        devices,
        environment=os.environ,
        place=place,
        fits=lambda profile: not moved(profile, accelerators),
    )
    return found if found is None or found.key.get("torch") == Machine.here().torch else None

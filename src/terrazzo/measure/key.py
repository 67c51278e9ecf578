"""The key of a profile: everything that makes one worthless when it changes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.records import Graph
from terrazzo.records.graph import fingerprint
from terrazzo.records.machine import Machine
from terrazzo.records.profile import VERSION, Profile

FREQUENCIES = Path("/sys/devices/system/cpu/cpu0/cpufreq")
METHOD = 6
"""Raised when measuring itself changes, so that older figures are not mixed with newer ones."""

MODEL, PLACE, ACCELERATORS = "model", "devices", "accelerators"
NONE = "none"
CPU = "its CPU"
WHERE = "TERRAZZO_PLACE"
"""The variable that tells a device what ``--on`` said."""


def profile_key(
    graph: Graph,
    *,
    place: str,
    threads: Sequence[int],
    emulated: str = "",
    accelerators: Sequence[str] = (),
) -> Mapping[str, str]:
    """What a profile of this model on these devices would hold for, if it were made now.

    ``place`` is what ``--on`` says, ``emulated`` the presets behind it as text, ``accelerators``
    what the net of each device lies on, empty for a CPU.
    """
    machine = Machine.here()
    return {
        MODEL: graph.digest,
        PLACE: place,
        "machine": fingerprint(
            {k: v for k, v in asdict(machine).items() if k not in ("torch", "terrazzo", "python")}
        ),
        "python": machine.python,
        "torch": machine.torch,
        "threads": ",".join(map(str, threads)),
        "power state": power_state(),
        "emulation": fingerprint(emulated) if emulated else NONE,
        ACCELERATORS: "; ".join(one or CPU for one in accelerators) if any(accelerators) else NONE,
        **measured_by(),
    }


def measured_by() -> Mapping[str, str]:
    """This Terrazzo, whose own kernels are timed too, and the way it measures today."""
    return {"terrazzo": Machine.here().terrazzo, "profile version": f"{VERSION}.{METHOD}"}


def is_current(key: Mapping[str, str]) -> bool:
    return measured_by().items() <= key.items()


def difference(key: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first thing in which a profile is of something else; empty if in nothing."""
    for name, value in key.items():
        if other.get(name) != value:
            return f"{name} was {other.get(name, 'not noted')}, is {value}"
    return ""


def power_state(folder: Path = FREQUENCIES) -> str:
    """The governor and the highest clock, where the system tells: other settings, other rates."""
    words = []
    for name, unit in (("scaling_governor", ""), ("scaling_max_freq", " kHz")):
        try:
            words.append((folder / name).read_text(encoding="ascii").strip() + unit)
        except (OSError, UnicodeDecodeError):
            continue
    return ", ".join(words) or "unknown"


def refuse_other(key: Mapping[str, str], graph: Graph, *, running: bool) -> None:
    """Refuses a profile that was given and is of something else; a guess names no model.

    Where nothing runs, the devices that were measured may have another torch than this machine.
    """
    remedy = "measure this one with terrazzo cluster profile, or leave the profile out"
    if key.get(MODEL, graph.digest) != graph.digest:
        raise UsageError(
            f"the profile is of model {key[MODEL]}, this one (or its input shape, its precision or "
            f"its mode) is {graph.digest}: {remedy}"
        )
    here = Machine.here()
    for name, version in (("torch", here.torch), ("terrazzo", here.terrazzo)):
        if running and key.get(name, version) != version:
            raise UsageError(f"the profile is of {name} {key[name]}, here is {version}: {remedy}")


def moved(profile: Profile, accelerators: Mapping[int, str]) -> str:
    """The first device whose net lies on something else than when it was measured; empty: none.

    ``accelerators`` are what nets lie on now, by device, as far as that is known.
    """
    for place, device in enumerate(profile.devices):
        here = accelerators.get(place, device.accelerator)
        if device.accelerator != here:
            was = device.accelerator or CPU
            return f"{device.name} was measured on {was}, its net lies on {here or CPU}"
    return ""

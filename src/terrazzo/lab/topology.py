"""The topology: which devices, how fast, how linked. A record; making it real is for LabHosts.

6xpi3            six of one kind, by cable to one switch
2xpi5,3xpi3      kinds mixed
4xpi4:wifi       four that share one channel of air
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.lab.preset import WIFI, WIRE, LinkSpeed, Preset, Storage
from terrazzo.records import document

KIND, VERSION = "lab-topology", 1
MOST_DEVICES = 200
NETWORK, PREFIX_BITS = "10.77.0", 24
"""Known to nobody outside the lab: its namespaces have no way to this machine's networks."""
GROUP = re.compile(r"(?P<count>[0-9]{1,4})x(?P<preset>[A-Za-z][A-Za-z0-9]*)(?P<link>:[a-z]+)?")
RELAYED = 2
"""From one station to another a frame crosses the air twice: up to the access point, and down."""
REPLACES = "give 4 (local processes), 6xpi3, 2xpi5,3xpi3 or 4xpi4:wifi (emulated)"


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """One device as it shall behave."""

    name: str
    preset: str
    address: str
    flops_per_s: float
    threads: int
    memory_bytes: int
    link: LinkSpeed
    storage: Storage | None = None
    watts: float | None = None
    """What such a board draws while all its cores work."""
    vector_bits: int = 0
    board: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster as it shall behave."""

    description: str
    devices: tuple[EmulatedDevice, ...]
    link_kind: str = WIRE

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def air_bits_per_s(self) -> float | None:
        """Payload a second that all devices together get through the air, in any direction.

        The slowest station's rate: a channel serves its stations one after the other, and all
        traffic here is between stations, so each frame is counted for both its hops.
        """
        if self.link_kind != WIFI:
            return None
        return min(device.link.bits_per_s for device in self.devices) / RELAYED

    @classmethod
    def parse(cls, description: str, presets: Mapping[str, Preset]) -> Topology:
        """Reads what ``--on`` says."""
        found: list[tuple[Preset, str, LinkSpeed]] = []
        for text in description.split(","):
            match = GROUP.fullmatch(text.strip())
            if match is None:
                raise UsageError(f"--on {description}: {text!r} is not understood; {REPLACES}")
            count, wish = int(match["count"]), (match["link"] or ":")[1:] or None
            preset = _known(match["preset"], presets)
            if count < 1:
                raise UsageError(
                    f"--on {description} asks for {count} of {preset.name}; at least 1"
                )
            if wish not in (None, WIRE, WIFI):
                raise UsageError(f"--on {description}: no link {wish}; there are wire and wifi")
            found += [(preset, *preset.link(wish))] * count
        if len(found) > MOST_DEVICES:
            raise UsageError(
                f"--on {description} asks for {len(found)} devices, the lab has addresses for "
                f"{MOST_DEVICES}"
            )
        kinds = {kind for _, kind, _ in found}
        if len(kinds) > 1:
            raise UsageError(
                f"--on {description} mixes wire and wifi, which the lab does not emulate: put all "
                "devices on the air (:wifi after each kind), or none"
            )
        devices = tuple(
            _device(index, preset, speed) for index, (preset, _, speed) in enumerate(found)
        )
        return cls(description, devices, kinds.pop())

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        body = document.parse(text, KIND, VERSION)
        devices = tuple(_from_table(table) for table in body["devices"])
        return cls(body["description"], devices, body["link_kind"])


def is_description(text: str) -> bool:
    """Whether ``--on`` asks for emulated devices, rightly spelled or nearly so."""
    return all(re.match(r"\s*[0-9]+x", part) for part in text.split(","))


def _known(name: str, presets: Mapping[str, Preset]) -> Preset:
    if name not in presets:
        raise UsageError(
            f"no preset {name}; there are {', '.join(sorted(presets))}. Add your own in "
            "terrazzo-presets.toml, or in a file named by --presets"
        )
    return presets[name]


def _device(index: int, preset: Preset, speed: LinkSpeed) -> EmulatedDevice:
    return EmulatedDevice(
        name=f"{preset.name}-{index}",
        preset=preset.name,
        address=f"{NETWORK}.{index + 1}",
        flops_per_s=preset.flops_per_s,
        threads=preset.threads,
        memory_bytes=preset.memory_bytes,
        link=speed,
        storage=preset.storage,
        watts=preset.watts,
        vector_bits=preset.vector_bits,
        board=preset.board,
    )


def _from_table(table: Mapping[str, Any]) -> EmulatedDevice:
    rest = {key: value for key, value in table.items() if key not in ("link", "storage")}
    storage = Storage(**table["storage"]) if table["storage"] else None
    return EmulatedDevice(**rest, link=LinkSpeed(**table["link"]), storage=storage)

"""The format of a board model: what a TOML file says of a simulated board.

version = 1
name = "orin-like"              # shown with the word simulated wherever numbers appear
tree = "jetson"                 # how its files are laid out: jetson, pi or desktop
cores = 8
cluster = 4                     # cores that share one clock
base_w = 2.4                    # what draws power whatever the clocks are

[cpu]                           # likewise [gpu] and [memory], where the board has such a knob
hz = [...]                      # the clocks it can have
volts = [[0.6, 0.62], ...]      # share of the highest clock, volts: straight between, flat outside
farads = 1.0e-10                # switched at full work (of one core)
idle_share = 0.3                # the part of that which switches without work
leak_w = 0.1                    # at 25 degrees and one volt (of one core)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.errors import UsageError
from terrazzo.records.toml import read_toml

VERSION = 1
KNOWN = ("orin-like", "pi-like")


@dataclass(frozen=True, slots=True)
class Clock:
    """One clock and the circuits behind it."""

    hz: tuple[float, ...]
    volts: tuple[tuple[float, float], ...]
    farads: float
    idle_share: float
    leak_w: float

    def voltage(self, hz: float) -> float:
        shares, volts = zip(*self.volts, strict=True)
        return float(np.interp(hz / self.hz[-1], shares, volts))

    def dynamic_w(self, hz: float, busy: float) -> float:
        """Switching, with so large a part of the time spent working."""
        active = self.idle_share + (1 - self.idle_share) * min(busy, 1.0)
        return self.farads * self.voltage(hz) ** 2 * hz * active

    def leakage_w(self, hz: float, warmth: float) -> float:
        """``warmth``: how many times as much leaks as at 25 degrees."""
        return self.leak_w * self.voltage(hz) * warmth


@dataclass(frozen=True, slots=True)
class Thermal:
    """One lump of metal; above its limit the board lowers its own clocks."""

    ambient_c: float
    c_per_w: float
    seconds: float
    limit_c: float
    leak_per_c: float


@dataclass(frozen=True, slots=True)
class Speed:
    """What the clocks are good for."""

    gpu_flops_per_hz: float
    cpu_flops_per_hz: float
    bytes_per_hz: float
    """Of the memory clock; a board without one has ``fixed_bytes_per_s``."""
    fixed_bytes_per_s: float
    gpu_bytes_per_hz: float
    """The most that the processor can ask of memory."""
    launch_cycles: float
    stall: float
    """Cycles a processor waits longer for memory, as its clock outruns that of memory."""
    serial: float
    """The part of a computation on several cores that only one can do."""
    softness: float
    """Of the roofline: large is a sharp corner."""
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Sensor:
    """What a reading loses: noise, an offset that wanders, and steps of the converter."""

    noise: float
    wander: float
    amps_step: float
    volts_step: float
    time_noise: float
    disturbed: float
    """The part of all measurements that something else on the board disturbs."""


@dataclass(frozen=True, slots=True)
class Board:
    """A simulated board."""

    name: str
    tree: str
    cores: int
    cluster: int
    base_w: float
    loss_per_w: float
    bytes_w: float
    """Watts for each 1e9 bytes a second that memory moves."""
    cpu: Clock
    gpu: Clock | None
    memory: Clock | None
    thermal: Thermal
    speed: Speed
    sensor: Sensor
    presets: tuple[tuple[str, Mapping[str, float]], ...] = ()

    @property
    def knobs(self) -> dict[str, tuple[float, ...]]:
        """By name, the values that each may have, in rising order."""
        if self.tree == "desktop":
            found: dict[str, tuple[float, ...]] = {}
        else:
            found = {
                "cores": tuple(float(count) for count in range(1, self.cores + 1)),
                "cpu_hz": self.cpu.hz,
            }
        for name, clock in (("gpu_hz", self.gpu), ("mem_hz", self.memory)):
            if clock is not None:
                found[name] = clock.hz
        return found

    def full(self, mode: Mapping[str, float]) -> dict[str, float]:
        """A mode with all that it leaves out at its highest."""
        found = {
            "cores": float(self.cores),
            "cpu_hz": self.cpu.hz[-1],
            "gpu_hz": 0.0,
            "mem_hz": 0.0,
        }
        found |= {name: values[-1] for name, values in self.knobs.items()}
        return found | dict(mode)


@dataclass(frozen=True, slots=True)
class Workload:
    """What one training step asks of a board."""

    name: str
    flops: float
    bytes: float
    launches: float
    input_cycles: float
    """Fetching and preparing one batch, on any number of cores."""
    serial_cycles: float = 0.0


def load_board(name: str | Path) -> Board:
    """One of ours by its name, or a file."""
    path = Path(name)
    if str(name) in KNOWN:
        path = Path(str(resources.files("terrazzo.boards").joinpath(f"{name}.toml")))
    elif not path.is_file():
        raise UsageError(
            f"there is no simulated board {name}; known are {', '.join(KNOWN)}, or give a file"
        )
    table = read_toml(path, "board")
    if table.get("version") != VERSION:
        raise UsageError(
            f"board {path} has version {table.get('version')!r}, this Terrazzo reads {VERSION}"
        )
    try:
        return board_of(table)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"board {path} lacks or misspells something ({error!r})") from error


def board_of(table: Mapping[str, Any]) -> Board:
    """A board from the tables of its file."""
    presets = tuple(
        (str(name), {str(knob): float(value) for knob, value in values.items()})
        for name, values in table.get("presets", {}).items()
    )
    return Board(
        name=str(table["name"]),
        tree=str(table["tree"]),
        cores=int(table["cores"]),
        cluster=int(table["cluster"]),
        base_w=float(table["base_w"]),
        loss_per_w=float(table["loss_per_w"]),
        bytes_w=float(table["bytes_w"]),
        cpu=_clock(table["cpu"]),
        gpu=_clock(table["gpu"]) if "gpu" in table else None,
        memory=_clock(table["memory"]) if "memory" in table else None,
        thermal=Thermal(**_floats(table["thermal"])),
        speed=Speed(**_floats(table["speed"])),
        sensor=Sensor(**_floats(table["sensor"])),
        presets=presets,
    )


def _clock(table: Mapping[str, Any]) -> Clock:
    return Clock(
        hz=tuple(sorted(float(hz) for hz in table["hz"])),
        volts=tuple((float(share), float(volts)) for share, volts in table["volts"]),
        farads=float(table["farads"]),
        idle_share=float(table["idle_share"]),
        leak_w=float(table["leak_w"]),
    )


def _floats(table: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in table.items()}


def spread(low: float, high: float, count: int) -> Sequence[float]:
    """Clocks as boards have them: even steps, rounded to 100 kHz."""
    return [round(hz / 1e5) * 1e5 for hz in np.linspace(low, high, count)]

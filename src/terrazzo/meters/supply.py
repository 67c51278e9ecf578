"""Batteries that sysfs knows: what flows out of them is what a device draws.

USB-C supplies look alike there, but their drivers (ucsi, tcpm) show what was agreed with the
charger, 20 V and 3 A say, and not what flows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import BOARD, Reading, number, sensible, text_of


@dataclass(frozen=True, slots=True)
class Supply:
    """The batteries of a device; of two, one may rest while the other discharges."""

    folders: tuple[Path, ...]
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 0.5
    error: float = 0.1
    moves_s: float = 180.0
    """Gauges of batteries are looked at by their firmware once a second, or once in a minute."""
    window_s: float = 60.0

    @property
    def name(self) -> str:
        return f"battery {' + '.join(folder.name for folder in self.folders)}"

    def read(self) -> Reading:
        states = {folder: text_of(folder / "status") for folder in self.folders}
        used = [folder for folder, state in states.items() if state == "Discharging"]
        if not used or "Charging" in states.values():
            raise MeterError(
                f"{self.folders[0]} is {states[self.folders[0]] or 'silent'}: what a device draws "
                "is seen only while its battery discharges; unplug it, or use another meter"
            )
        return Reading(watts=sensible(sum(_watts(folder) for folder in used), self.name))


def _watts(folder: Path) -> float:
    direct = folder / "power_now"
    if direct.exists():
        return abs(number(direct)) / 1e6
    volts = number(folder / "voltage_now") / 1e6
    return volts * abs(number(folder / "current_now")) / 1e6


def probe(root: Path) -> list[Supply]:
    """What is in use now and says how much flows; MeterError where there is only a USB-C supply."""
    batteries, promises = [], []
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        kind = text_of(folder / "type")
        if text_of(folder / "scope") == "Device":  # of a mouse
            continue
        if kind == "Battery":
            batteries.append(folder)
        elif kind == "USB" and text_of(folder / "online") == "1":
            promises.append(folder)
    meter = Supply(tuple(batteries))
    try:
        if batteries and meter.read().watts:  # many have the files and always say 0
            return [meter]
    except MeterError:
        pass
    if promises:
        raise MeterError(
            f"{promises[0]} tells what was agreed with the charger, not what flows: use a meter "
            "between both (docs/power.md)"
        )
    return []

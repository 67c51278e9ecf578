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
    """A battery while it discharges."""

    folder: Path
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 0.5
    error: float = 0.1
    moves_s: float = 180.0
    """Gauges of batteries are looked at by their firmware once a second, or once in a minute."""
    window_s: float = 60.0

    @property
    def name(self) -> str:
        return f"battery {self.folder.name}"

    def read(self) -> Reading:
        if text_of(self.folder / "status") != "Discharging":
            raise MeterError(
                f"{self.folder} is {text_of(self.folder / 'status') or 'silent'}: what a device "
                "draws is seen only while its battery discharges; unplug it, or use another meter"
            )
        direct = self.folder / "power_now"
        if direct.exists():
            watts = abs(number(direct)) / 1e6
        else:
            volts = number(self.folder / "voltage_now") / 1e6
            watts = volts * abs(number(self.folder / "current_now")) / 1e6
        return Reading(watts=sensible(watts, self.name))


def probe(root: Path) -> list[Supply]:
    """Those in use now, that say how much flows; MeterError where there is only a USB-C supply."""
    found, promises = [], []
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        kind = text_of(folder / "type")
        if text_of(folder / "scope") == "Device":  # of a mouse
            continue
        if kind == "Battery" and text_of(folder / "status") == "Discharging":
            found.append(Supply(folder))
        elif kind == "USB" and text_of(folder / "online") == "1":
            promises.append(folder)
    told = []
    for meter in found:
        try:
            watts = meter.read().watts
        except MeterError:
            continue
        if watts:  # many supplies have the files and always say 0
            told.append(meter)
    if not told and promises:
        raise MeterError(
            f"{promises[0]} tells what was agreed with the charger, not what flows: use a meter "
            "between both (docs/power.md)"
        )
    return told[:1]

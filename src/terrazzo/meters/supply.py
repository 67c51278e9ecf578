"""Batteries and USB-C supplies that sysfs knows: what flows out of them is what a device draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import BOARD, Reading, number, sensible, text_of


@dataclass(frozen=True, slots=True)
class Supply:
    """A battery while it discharges, or a USB-C supply while it is connected."""

    folder: Path
    kind: str
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 0.5
    """Gauges of batteries change once a second or slower."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.folder.name}"

    def read(self) -> Reading:
        if self.kind == "battery" and text_of(self.folder / "status") != "Discharging":
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
    """Those in use now, that say how much flows."""
    found = []
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        kind = text_of(folder / "type")
        if kind == "Battery" and text_of(folder / "status") == "Discharging":
            found.append(Supply(folder, "battery"))
        elif kind == "USB" and text_of(folder / "online") == "1":
            found.append(Supply(folder, "usb-c"))
    told = []
    for meter in found:
        try:
            watts = meter.read().watts
        except MeterError:
            continue
        if watts:  # many supplies have the files and always say 0
            told.append(meter)
    return told[:1]

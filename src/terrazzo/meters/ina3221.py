"""INA3221: the current sensors of Jetsons, through hwmon and through the iio of older systems.

Boards differ in what their three channels measure. Where one is the board's input (VDD_IN, 5V_IN),
it is the whole; the others are parts of it. Where none is, the rails that are fed side by side are
summed, and the name says which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import BOARD, MOVES_S, Reading, number, sensible, text_of

INPUTS = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN_SYS_5V0_IN")
SIDE_BY_SIDE = (
    "VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO",
    "GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V",
)  # fmt: skip
"""Rails of boards without a sensor at their input (AGX Orin, AGX Xavier): together nearly all."""


@dataclass(frozen=True, slots=True)
class Rail:
    """One channel: its label, and the files that give its power."""

    label: str
    milliwatts: Path | None
    millivolts: Path
    milliamperes: Path

    def watts(self) -> float:
        if self.milliwatts is not None:
            return number(self.milliwatts) / 1e3
        return number(self.millivolts) * number(self.milliamperes) / 1e6


@dataclass(frozen=True, slots=True)
class Ina3221:
    """The rails that together are the board."""

    rails: tuple[Rail, ...]
    parts: tuple[Rail, ...] = ()
    """Rails behind the input: shown, never added."""
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 0.1
    moves_s: float = MOVES_S
    window_s: float = 1.0

    @property
    def error(self) -> float:
        """Of shunt and converter; more where rails are summed, of which some may hang on others,
        and beside which there is something that has no sensor."""
        return 0.05 if len(self.rails) == 1 else 0.15

    @property
    def name(self) -> str:
        return f"INA3221 {' + '.join(rail.label for rail in self.rails)}"

    def read(self) -> Reading:
        return Reading(watts=sensible(sum(rail.watts() for rail in self.rails), self.name))


def probe(root: Path) -> list[Ina3221]:
    """The sensor of this board, once it has given a reading."""
    rails = [*_hwmon(root), *_iio(root)]
    if not rails:
        return []
    whole = [rail for rail in rails if rail.label in INPUTS][:1]
    chosen = whole or [rail for rail in rails if rail.label in SIDE_BY_SIDE]
    if not chosen:
        labels = ", ".join(rail.label for rail in rails)
        raise MeterError(
            f"the INA3221 of this board has rails {labels}; which of them sum to the board is not "
            "known to Terrazzo: its power is not measured"
        )
    meter = Ina3221(tuple(chosen), tuple(rail for rail in rails if rail not in chosen))
    meter.read()
    return [meter]


def _hwmon(root: Path) -> Sequence[Rail]:
    found = []
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if text_of(folder / "name") != "ina3221":
            continue
        for path in sorted(folder.glob("in[1-3]_label")):
            channel = path.name[2]
            label, amps = text_of(path), folder / f"curr{channel}_input"
            if label and label != "NC" and amps.exists():
                found.append(Rail(label, None, folder / f"in{channel}_input", amps))
    return found


def _iio(root: Path) -> Sequence[Rail]:
    found = []
    for path in sorted((root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio*device*/rail_name_*")):
        match = re.search(r"(\d+)$", path.name)
        label = text_of(path)
        if match is None or not label:
            continue
        folder, channel = path.parent, match.group()
        watts = folder / f"in_power{channel}_input"
        found.append(
            Rail(
                label,
                watts if watts.exists() else None,
                folder / f"in_voltage{channel}_input",
                folder / f"in_current{channel}_input",
            )
        )
    return found

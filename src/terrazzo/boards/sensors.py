"""The sensors of a simulated board: its power as the files that each kind of meter reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terrazzo.boards.board import Board
from terrazzo.boards.physics import Truth

RAPL_RANGE_UJ = 262_143_328
"""Small, so that it wraps around within a short test."""
HWMON = "sys/class/hwmon/hwmon3"
IIO = "sys/bus/i2c/drivers/ina3221x/0-0040/iio:device0"
RAPL = "sys/class/powercap/intel-rapl:0"
BATTERY = "sys/class/power_supply/BAT0"
USB_C = "sys/class/power_supply/ucsi-source-psy-1"
PMIC = "run/vcgencmd"
EXTERNAL = "run/meter.txt"
PI_RAILS = (("VDD_CORE", 0.88), ("1V8_SYS", 1.8), ("3V3_SYS", 3.3), ("DDR_VDD2", 1.1))
VCGENCMD = '#!/bin/sh\nexec cat "$(dirname "$0")/../../run/vcgencmd/$1"\n'


@dataclass(frozen=True, slots=True)
class Shown:
    """What sensors see at one moment: power with their noise, energy as a counter has it."""

    time_s: float
    factor: float
    """One plus noise."""
    energy_j: float
    truth: Truth


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def hwmon(root: Path, board: Board, shown: Shown) -> None:
    """INA3221 as hwmon shows it: millivolts and milliamperes, in steps."""
    folder = root / HWMON
    put(folder / "name", "ina3221")
    for number, (label, volts, watts) in enumerate(_rails(shown), start=1):
        amps = _step(watts / volts, board.sensor.amps_step)
        put(folder / f"in{number}_label", label)
        put(folder / f"in{number}_input", str(round(_step(volts, board.sensor.volts_step) * 1e3)))
        put(folder / f"curr{number}_input", str(round(amps * 1e3)))
    put(folder / "in7_label", "sum of shunt voltages")


def iio(root: Path, board: Board, shown: Shown) -> None:
    """INA3221 as older systems show it: milliwatts."""
    folder = root / IIO
    for number, (label, volts, watts) in enumerate(_rails(shown)):
        amps = _step(watts / volts, board.sensor.amps_step)
        put(folder / f"rail_name_{number}", label)
        put(folder / f"in_voltage{number}_input", str(round(volts * 1e3)))
        put(folder / f"in_current{number}_input", str(round(amps * 1e3)))
        put(folder / f"in_power{number}_input", str(round(amps * volts * 1e3)))


def _rails(shown: Shown) -> list[tuple[str, float, float]]:
    rails, factor = shown.truth.rails_w, shown.factor
    chip_w = rails["cpu"] + rails["gpu"]
    return [
        ("VDD_IN", 5.0, shown.truth.power_w * factor),
        ("VDD_CPU_GPU_CV", 5.0, chip_w * factor),
        ("VDD_SOC", 5.0, rails["memory"] * factor),
    ]


def pmic(root: Path, board: Board, shown: Shown) -> None:
    """A Pi 5's regulators, by an executable that answers as vcgencmd does."""
    tool = root / "usr/bin/vcgencmd"
    if not tool.exists():
        put(tool, VCGENCMD.rstrip())
        tool.chmod(0o755)
        put(root / PMIC / "get_throttled", "throttled=0x0")
    total_w = shown.truth.power_w * shown.factor
    shares = (0.55, 0.1, 0.2, 0.15)
    lines = []
    for number, ((rail, volts), share) in enumerate(zip(PI_RAILS, shares, strict=True)):
        amps = _step(total_w * share / volts, board.sensor.amps_step)
        lines.append(f"   {rail}_A current({number})={amps:.8f}A")
    for number, (rail, volts) in enumerate(PI_RAILS, start=len(PI_RAILS)):
        lines.append(f"   {rail}_V volt({number})={_step(volts, board.sensor.volts_step):.8f}V")
    lines.append("   EXT5V_V volt(24)=5.14940000V")
    put(root / PMIC / "pmic_read_adc", "\n".join(lines))
    bits = 0xE0008 if shown.truth.throttled else 0x0
    put(root / PMIC / "get_throttled", f"throttled={bits:#x}")


def rapl(root: Path, board: Board, shown: Shown) -> None:
    """A counter of microjoules that wraps around; its core domain is a part of the package."""
    range_uj = RAPL_RANGE_UJ
    for folder, name, part in ((RAPL, "package-0", 1.0), (f"{RAPL}/intel-rapl:0:0", "core", 0.6)):
        put(root / folder / "name", name)
        put(root / folder / "max_energy_range_uj", str(range_uj))
        put(root / folder / "energy_uj", str(int(shown.energy_j * part * 1e6) % range_uj))


def battery(root: Path, board: Board, shown: Shown) -> None:
    _supply(root / BATTERY, shown, volts=11.4, kind="Battery")
    put(root / BATTERY / "status", "Discharging")


def usb_c(root: Path, board: Board, shown: Shown) -> None:
    """Drivers show the contract with the charger, whatever flows."""
    put(root / USB_C / "type", "USB")
    put(root / USB_C / "voltage_now", "20000000")
    put(root / USB_C / "current_now", "3000000")
    put(root / USB_C / "online", "1")


def _supply(folder: Path, shown: Shown, *, volts: float, kind: str) -> None:
    put(folder / "type", kind)
    put(folder / "voltage_now", str(round(volts * 1e6)))
    amps = shown.truth.power_w * shown.factor / volts
    put(folder / "current_now", str(round(amps * 1e6)))


def external(root: Path, board: Board, shown: Shown) -> None:
    """A meter in the supply line: another line for each reading."""
    path = root / EXTERNAL
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="ascii") as lines:
        lines.write(f"{shown.time_s:.3f} {shown.truth.power_w * shown.factor:.3f}\n")


SENSORS: dict[str, Callable[[Path, Board, Shown], None]] = {
    "hwmon": hwmon, "iio": iio, "pmic": pmic, "rapl": rapl, "battery": battery, "usb-c": usb_c,
    "external": external,
}  # fmt: skip
USUAL = {"jetson": ("hwmon",), "pi": ("pmic",), "desktop": ("rapl",)}


def _step(value: float, step: float) -> float:
    return round(value / step) * step

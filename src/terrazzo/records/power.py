"""How commands and devices speak of power: variables, places, and amounts as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from terrazzo.errors import UsageError

POWER = "TERRAZZO_POWER"
"""The variable that says how energy is told: auto, off, or for an emulated device its figures."""
METER_FILE = "TERRAZZO_METER"
"""The variable that names the file into which an external meter's readings are written."""
EMULATED = "emulated"
IDLE_PART = 0.45
"""Of what a small board draws with all cores at work, that which it draws idle: an estimate."""
AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]-?[0-9]+)?)\s*([A-Za-z]*)\s*")


def calibration_path(environment: Mapping[str, str]) -> Path:
    """Where what a real meter said of this device is kept."""
    home = environment.get("XDG_CONFIG_HOME") or ""
    folder = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
    return folder / "terrazzo" / "calibration.json"


def emulation(idle_w: float, core_w: float) -> str:
    """The figures of an emulated device, as its processes find them."""
    return f"{EMULATED} {idle_w:.4g} {core_w:.4g}"


def emulated(text: str) -> tuple[float, float] | None:
    """Idle watts and watts of a second of processor time; None: the device is not emulated."""
    words = text.split()
    if len(words) != 3 or words[0] != EMULATED:
        return None
    try:
        return float(words[1]), float(words[2])
    except ValueError:
        return None


def parse_watts(text: str) -> float:
    """``12W``, ``12.5``, ``900mW``."""
    return _amount(text, {"": 1.0, "w": 1.0, "mw": 1e-3, "kw": 1e3}, "watts, such as 12W")


def parse_joules(text: str) -> float:
    """``5200J``, ``1.4Wh``, ``300mWh``."""
    units = {"": 1.0, "j": 1.0, "kj": 1e3, "wh": 3600.0, "mwh": 3.6, "kwh": 3.6e6}
    return _amount(text, units, "energy, such as 5200J or 1.4Wh")


def parse_seconds(text: str) -> float:
    """``6h``, ``90min``, ``40s``."""
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return _amount(text, units, "a time, such as 6h, 90min or 40s")


def _amount(text: str, units: Mapping[str, float], wanted: str) -> float:
    match = AMOUNT.fullmatch(text)
    scale = units.get(match.group(2).lower()) if match else None
    if match is None or scale is None or float(match.group(1)) <= 0:
        raise UsageError(f"{text!r} is not understood: say {wanted}")
    return float(match.group(1)) * scale


def watts_text(watts: float) -> str:
    """``850 mW``, ``6.31 W``, ``121 W``."""
    if watts < 0.9995:  # else it would read 1000 mW
        return f"{watts * 1e3:.0f} mW"
    return f"{watts:.{0 if watts >= 100 else 1 if watts >= 10 else 2}f} W"


def joules_text(joules: float) -> str:
    """``2.1 mJ``, ``6.31 J``, ``1.2 kJ``, ``3.4 Wh``."""
    if not joules:
        return "0 J"
    if joules >= 36_000:
        return f"{joules / 3600:.3g} Wh"
    for limit, scale, unit in ((1000, 1e3, "kJ"), (1, 1.0, "J"), (1e-3, 1e-3, "mJ")):
        if joules >= limit:
            return f"{joules / scale:.3g} {unit}"
    return f"{joules * 1e6:.3g} µJ"

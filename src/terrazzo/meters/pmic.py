"""The PMIC of a Raspberry Pi 5: currents and voltages of its rails, asked for with vcgencmd.

The sum leaves out what the regulators themselves lose and what hangs on USB: a meter at the plug
shows more.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import BOARD, MOVES_S, Reading, sensible

LINE = re.compile(r"(\w+)_([AV]) (?:current|volt)\(\d+\)=([0-9.]+)[AV]")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pmic:
    """All rails that have both a current and a voltage."""

    tool: str
    rails: int = 0
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 1.0
    """A process is started for each reading, which takes some milliseconds of a core."""
    error: float = 0.3
    """People who held a meter to the plug read a sixth and half a watt more."""
    moves_s: float = MOVES_S
    window_s: float = 5.0

    @property
    def name(self) -> str:
        return f"PMIC, {self.rails} rails summed"

    def read(self) -> Reading:
        return Reading(watts=sensible(sum(rails(self.tool).values()), "the PMIC"))


def rails(tool: str) -> dict[str, float]:
    """Watts of each rail."""
    try:
        done = subprocess.run(
            [tool, "pmic_read_adc"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MeterError(
            f"vcgencmd pmic_read_adc failed ({error}): only a Pi 5 has this sensor, and its user "
            "has to be in the group video"
        ) from error
    values = {(name, unit): float(value) for name, unit, value in LINE.findall(done.stdout)}
    return {
        name: amps * values[name, "V"]
        for (name, unit), amps in values.items()
        if unit == "A" and (name, "V") in values
    }


FLAGS = ("under-voltage", "clock capped", "throttled", "near its limit of heat")


def throttling(root: Path) -> list[str]:
    """What a Raspberry Pi says of itself: now, and since it was started."""
    tool = _tool(root)
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "get_throttled"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        bits = int(done.stdout.strip().partition("=")[2], 16)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    now = [f"{flag} now" for place, flag in enumerate(FLAGS) if bits >> place & 1]
    past = [f"{flag} since the start" for place, flag in enumerate(FLAGS) if bits >> 16 + place & 1]
    return now + past


def _tool(root: Path) -> str | None:
    own = root / "usr/bin/vcgencmd"
    if own.is_file():
        return str(own)
    return shutil.which("vcgencmd") if root == Path("/") else None


def probe(root: Path) -> list[Pmic]:
    """A Pi 5's sensor; earlier boards answer with an error, or with no rails."""
    tool = _tool(root)
    if tool is None:
        return []
    found = rails(tool)
    return [Pmic(tool, len(found))] if found else []

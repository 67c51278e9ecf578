"""Vitals: how warm a device is, whether it slows itself down for that, and its memory."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from terrazzo.cluster.agent.look import meminfo

THERMAL = Path("/sys/class/thermal")
CPUS = Path("/sys/devices/system/cpu")
NOW_BITS = 0xF
"""Of vcgencmd's answer: what is so now; higher bits tell of the past."""


class Vitals:
    """Reads what the system tells; what it does not is None."""

    def __init__(self) -> None:
        self._vcgencmd = shutil.which("vcgencmd")
        self._throttles = self._throttle_count()

    def read(self, processes: list[int]) -> dict[str, Any]:
        return {
            "time_s": time.time(),
            "temperature_c": temperature_c(),
            "throttled": self._is_throttled(),
            "frequency_hz": frequency_hz(),
            "available_bytes": meminfo("MemAvailable"),
            "resident_bytes": sum(map(resident_bytes, processes)),
        }

    def _is_throttled(self) -> bool | None:
        if self._vcgencmd:
            try:
                done = subprocess.run(
                    [self._vcgencmd, "get_throttled"],
                    capture_output=True, text=True, check=True, timeout=2,
                )  # fmt: skip
                return bool(int(done.stdout.strip().partition("=")[2], 16) & NOW_BITS)
            except (OSError, ValueError, subprocess.SubprocessError):
                self._vcgencmd = None
        before, now = self._throttles, self._throttle_count()
        self._throttles = now
        return None if before is None or now is None else now > before

    def _throttle_count(self) -> int | None:
        counts = [
            _number(path) for path in CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        ]
        known = [int(count) for count in counts if count is not None]
        return sum(known) if known else None


def temperature_c() -> float | None:
    """The warmest sensor that gives a sensible answer."""
    seen = [_number(path) for path in THERMAL.glob("thermal_zone*/temp")]
    known = [value / 1000 for value in seen if value is not None and -40e3 < value < 200e3]
    return max(known, default=None)


def frequency_hz() -> float | None:
    seen = [_number(path) for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    known = [value * 1000 for value in seen if value is not None]
    return max(known, default=None)


def resident_bytes(process: int) -> int:
    try:
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

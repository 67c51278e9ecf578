"""NVML: power and energy of NVIDIA GPUs, through the driver's own library and nothing else.

On Jetsons the library initialises and then supports nothing: only a reading counts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import KnobError, MeterError
from terrazzo.meters.meter import GPU, MOVES_S, Reading, sensible

LIBRARY = "libnvidia-ml.so.1"
CORE, MEMORY = "Gpu", "Memory"
"""Clocks, as the names of functions call them."""
CLOCKS = {CORE: 0, MEMORY: 2}
MOST_CLOCKS = 1024
MEANINGS = {
    1: "not initialised", 2: "invalid argument", 3: "not supported by this device",
    4: "no permission: run as root, or let the helper do it", 9: "the driver is not loaded",
    15: "the GPU was lost",
}  # fmt: skip

THROTTLED = {
    0x4: "held by its power limit", 0x8: "slowed by hardware", 0x20: "slowed for heat",
    0x40: "slowed by hardware for heat", 0x80: "slowed by a power brake",
}  # fmt: skip


class Nvml:
    """The library, initialised."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library: Any = ctypes.CDLL(library)
        except OSError as error:
            raise MeterError(f"no NVIDIA driver here ({error})") from error
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise MeterError(f"this NVIDIA driver is too old: its NVML has no {name}") from None
        if status:
            raise MeterError(f"NVML {name}: {MEANINGS.get(status, f'error {status}')}")

    def gpus(self) -> list[NvmlGpu]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            found.append(NvmlGpu(self, index, handle))
        return found

    def number(self, name: str, handle: Any, kind: Any = ctypes.c_uint) -> int:
        value = kind()
        self._call(name, handle, ctypes.byref(value))
        return int(value.value)

    def number_of(self, name: str, handle: Any, which: int) -> int:
        value = ctypes.c_uint()
        self._call(name, handle, ctypes.c_uint(which), ctypes.byref(value))
        return value.value

    def pair(self, name: str, handle: Any) -> tuple[int, int]:
        low, high = ctypes.c_uint(), ctypes.c_uint()
        self._call(name, handle, ctypes.byref(low), ctypes.byref(high))
        return low.value, high.value

    def text(self, name: str, handle: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, handle, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode("utf-8", "replace")

    def set_numbers(self, name: str, handle: Any, *values: int) -> None:
        self._call(name, handle, *(ctypes.c_uint(value) for value in values))

    def numbers(self, name: str, handle: Any, *given: int) -> list[int]:
        """A list, of which the library says how long it is."""
        count, room = ctypes.c_uint(MOST_CLOCKS), (ctypes.c_uint * MOST_CLOCKS)()
        self._call(name, handle, *map(ctypes.c_uint, given), ctypes.byref(count), room)
        return list(room)[: count.value]


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU."""

    nvml: Nvml
    index: int
    handle: Any

    @property
    def title(self) -> str:
        return self.nvml.text("nvmlDeviceGetName", self.handle)

    def watts(self) -> float:
        return self.nvml.number("nvmlDeviceGetPowerUsage", self.handle) / 1e3

    def joules(self) -> float:
        """Since the driver was loaded; GPUs before Volta don't count."""
        name = "nvmlDeviceGetTotalEnergyConsumption"
        return self.nvml.number(name, self.handle, ctypes.c_ulonglong) / 1e3

    def heat_c(self) -> float:
        return float(self.nvml.number_of("nvmlDeviceGetTemperature", self.handle, 0))

    def throttling(self) -> list[str]:
        """Why its clocks are lower now than they could be."""
        name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        bits = self.nvml.number(name, self.handle, ctypes.c_ulonglong)
        return [words for bit, words in THROTTLED.items() if bits & bit]

    def limit_w(self) -> float:
        return self.nvml.number("nvmlDeviceGetPowerManagementLimit", self.handle) / 1e3

    def limits_w(self) -> tuple[float, float]:
        name = "nvmlDeviceGetPowerManagementLimitConstraints"
        low, high = self.nvml.pair(name, self.handle)
        return low / 1e3, high / 1e3

    def set_limit_w(self, watts: float) -> None:
        low, high = self.limits_w()
        if not low <= watts <= high:
            raise KnobError(
                f"GPU {self.index}: a limit of {watts:g} W is outside {low:g} to {high:g} W"
            )
        name = "nvmlDeviceSetPowerManagementLimit"
        try:
            self.nvml.set_numbers(name, self.handle, round(watts * 1e3))
        except MeterError as error:
            raise KnobError(f"GPU {self.index}: no limit of {watts:g} W: {error}") from error

    def clocks_hz(self, kind: str) -> tuple[float, ...]:
        """What the cores' or the memory's clock can be, in rising order."""
        found = self.nvml.numbers("nvmlDeviceGetSupportedMemoryClocks", self.handle)
        if kind == CORE and found:
            name = "nvmlDeviceGetSupportedGraphicsClocks"
            found = self.nvml.numbers(name, self.handle, max(found))
        return tuple(sorted(mhz * 1e6 for mhz in set(found)))

    def clock_hz(self, kind: str) -> float:
        """Where it is now."""
        mhz = self.nvml.number_of("nvmlDeviceGetClockInfo", self.handle, CLOCKS[kind])
        return mhz * 1e6

    def lock_clock(self, kind: str, hz: float) -> None:
        name, mhz = f"nvmlDeviceSet{kind}LockedClocks", round(hz / 1e6)
        self.nvml.set_numbers(name, self.handle, mhz, mhz)

    def free_clock(self, kind: str) -> None:
        self.nvml.set_numbers(f"nvmlDeviceReset{kind}LockedClocks", self.handle)


@dataclass(frozen=True)
class NvmlMeter:
    """The GPU's own counter, or where it has none its power."""

    gpu: NvmlGpu
    counts: bool
    covers: str = GPU
    is_measured: bool = True
    interval_s: float = 0.1
    error: float = 0.05
    moves_s: float = MOVES_S
    window_s: float = 1.0

    @property
    def name(self) -> str:
        return f"NVML GPU {self.gpu.index}, {'its counter' if self.counts else 'its power'}"

    def read(self) -> Reading:
        if self.counts:
            return Reading(joules=self.gpu.joules())
        return Reading(watts=sensible(self.gpu.watts(), self.name))


def heat(library: str = LIBRARY) -> list[str]:
    """Of each GPU that tells it: how warm it is, and what slows it down."""
    found = []
    try:
        gpus = Nvml(library).gpus()
    except MeterError:
        return []
    for gpu in gpus:
        try:
            words = [f"GPU {gpu.index} {gpu.heat_c():.0f} degrees C", *gpu.throttling()]
        except MeterError:
            continue
        found.append(", ".join(words))
    return found


def probe(library: str = LIBRARY) -> list[NvmlMeter]:
    """GPUs that give a reading."""
    try:
        gpus = Nvml(library).gpus()
    except MeterError:
        return []
    found = []
    for gpu in gpus:
        for counts in (True, False):
            meter = NvmlMeter(gpu, counts)
            try:
                meter.read()
            except MeterError:
                continue
            found.append(meter)
            break
    return found

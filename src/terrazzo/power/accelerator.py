"""The clocks of a Jetson's GPU (devfreq) and memory (EMC), and the power limit of a desktop GPU."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import KnobError, MeterError
from terrazzo.meters.meter import text_of
from terrazzo.meters.nvml import LIBRARY, Nvml, NvmlGpu
from terrazzo.power.cpu import Limits
from terrazzo.power.knob import Files
from terrazzo.power.sysfs import Sysfs

DEVFREQ = "sys/class/devfreq"
COMPATIBLE = "proc/device-tree/compatible"
GPU_NAMES = (".gpu", ".gp10b", ".gv11b", ".ga10b")
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
EMC_RATES = "sys/kernel/debug/bpmp/debug/emc/possible_rates"
LIMIT_STEPS = 9
TOLERANCE_W = 1.0
"""Drivers round limits."""


@dataclass(frozen=True, slots=True)
class GpuClock:
    """A GPU that devfreq governs."""

    sysfs: Sysfs
    folder: str
    values: tuple[float, ...]
    name: str = "gpu_hz"

    @classmethod
    def find(cls, sysfs: Sysfs) -> list[GpuClock]:
        if "nvidia," not in text_of(sysfs.path(COMPATIBLE)):
            return []  # other makers' GPUs have such files too: what they do nobody has looked at
        for path in sorted(sysfs.path(DEVFREQ).glob("*")):
            folder = f"{DEVFREQ}/{path.name}"
            values = sysfs.numbers(f"{folder}/available_frequencies")
            if path.name.endswith(GPU_NAMES) and len(values) > 1:
                return [cls(sysfs, folder, tuple(sorted(values)))]
        return []

    @property
    def governor(self) -> str:
        return self.sysfs.read(f"{self.folder}/governor")

    @property
    def _limits(self) -> Limits:
        return Limits(self.sysfs, f"{self.folder}/min_freq", f"{self.folder}/max_freq")

    def read(self) -> float:
        return float(self.sysfs.read(f"{self.folder}/max_freq"))

    def set(self, value: float) -> None:
        self._limits.set(f"{value:.0f}", f"{value:.0f}")

    def state(self) -> Files:
        return self._limits.state()

    def restore(self, files: Files) -> None:
        self._limits.restore(files)


@dataclass(frozen=True, slots=True)
class MemoryClock:
    """Memory's clock moves only while it is locked; unlocked, the system chooses it."""

    sysfs: Sysfs
    values: tuple[float, ...]
    name: str = "mem_hz"

    @classmethod
    def find(cls, sysfs: Sysfs) -> list[MemoryClock]:
        rates = sysfs.numbers(EMC_RATES)
        there = sysfs.numbers(f"{EMC}/rate")  # only root may look there
        return [cls(sysfs, tuple(sorted(khz * 1e3 for khz in rates)))] if there and rates else []

    @property
    def governor(self) -> str:
        return "" if self.sysfs.read(f"{EMC}/mrq_rate_locked") == "1" else "bpmp"

    def read(self) -> float:
        return float(self.sysfs.read(f"{EMC}/rate"))

    def set(self, value: float) -> None:
        self.sysfs.write(f"{EMC}/mrq_rate_locked", "1")
        self.sysfs.write(f"{EMC}/rate", f"{value:.0f}")

    def state(self) -> Files:
        return [(name, self.sysfs.read(name)) for name in (f"{EMC}/rate", f"{EMC}/mrq_rate_locked")]

    def restore(self, files: Files) -> None:
        saved = dict(files)
        lock = saved.get(f"{EMC}/mrq_rate_locked")
        if lock is None:
            return
        try:
            self.set(float(saved[f"{EMC}/rate"]))
        except KnobError:  # the system's passing choice, perhaps none of those that can be set
            if lock == "1":
                raise
        finally:
            self.sysfs.write(f"{EMC}/mrq_rate_locked", lock)


def memory_is_hidden(sysfs: Sysfs) -> bool:
    """Whether this may be a Jetson whose memory clock only root is shown."""
    try:
        sysfs.path(f"{EMC}/rate").stat()
    except PermissionError:
        return bool(GpuClock.find(sysfs))
    except OSError:
        pass
    return False


@dataclass(frozen=True)
class GpuLimit:
    """The watts that a GPU's driver lets it draw."""

    gpu: NvmlGpu
    values: tuple[float, ...]
    name: str = "gpu_limit_w"
    governor: str = "the driver"

    @classmethod
    def find(cls, library: str = LIBRARY) -> list[GpuLimit]:
        try:
            gpu = Nvml(library).gpus()[0]
            low, high = gpu.limits_w()
            gpu.limit_w()
        except (MeterError, IndexError):
            return []
        step = (high - low) / (LIMIT_STEPS - 1)
        even = {
            min(max(float(round(low + step * place)), low), high) for place in range(LIMIT_STEPS)
        }
        values = tuple(sorted(even | {gpu.limit_w()}))  # as it is set now can be gone back to
        return [cls(gpu, values)] if step > 0 else []

    def read(self) -> float:
        try:
            return self.gpu.limit_w()
        except MeterError as error:
            raise KnobError(f"GPU {self.gpu.index} tells no limit: {error}") from error

    def set(self, value: float) -> None:
        try:
            self.gpu.set_limit_w(value)
        except MeterError as error:
            raise KnobError(f"GPU {self.gpu.index}: no limit of {value:g} W: {error}") from error
        seen_w = self.read()
        if abs(seen_w - value) > TOLERANCE_W:
            raise KnobError(f"GPU {self.gpu.index} was told {value:g} W and says {seen_w:g} W")

    def state(self) -> Files:
        return [(f"nvml:{self.gpu.index}:limit", f"{self.read():g}")]

    def restore(self, files: Files) -> None:
        saved = dict(files).get(f"nvml:{self.gpu.index}:limit")
        if saved is not None:
            self.set(float(saved))

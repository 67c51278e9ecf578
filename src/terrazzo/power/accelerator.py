"""The clocks of a Jetson's GPU (devfreq) and memory (EMC), and the power limit of a desktop GPU."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import MeterError
from terrazzo.meters.nvml import LIBRARY, Nvml, NvmlGpu
from terrazzo.power.cpu import Limits
from terrazzo.power.knob import Files
from terrazzo.power.sysfs import Sysfs

DEVFREQ = "sys/class/devfreq"
GPU_NAMES = (".gpu", ".gp10b", ".gv11b", ".ga10b")
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
EMC_RATES = "sys/kernel/debug/bpmp/debug/emc/possible_rates"
LIMIT_STEPS = 9


@dataclass(frozen=True, slots=True)
class GpuClock:
    """A GPU that devfreq governs."""

    sysfs: Sysfs
    folder: str
    values: tuple[float, ...]
    name: str = "gpu_hz"

    @classmethod
    def find(cls, sysfs: Sysfs) -> list[GpuClock]:
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
        there = sysfs.path(f"{EMC}/rate").exists()
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
        if f"{EMC}/rate" in saved:
            self.set(float(saved[f"{EMC}/rate"]))
            self.sysfs.write(f"{EMC}/mrq_rate_locked", saved[f"{EMC}/mrq_rate_locked"])


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
        values = tuple(float(round(low + step * place)) for place in range(LIMIT_STEPS))
        return [cls(gpu, values)] if step > 0 else []

    def read(self) -> float:
        return self.gpu.limit_w()

    def set(self, value: float) -> None:
        self.gpu.set_limit_w(value)

    def state(self) -> Files:
        return [(f"nvml:{self.gpu.index}:limit", f"{self.gpu.limit_w():g}")]

    def restore(self, files: Files) -> None:
        saved = dict(files).get(f"nvml:{self.gpu.index}:limit")
        if saved is not None:
            self.gpu.set_limit_w(float(saved))

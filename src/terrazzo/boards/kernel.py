"""The files of a simulated board's knobs, and a kernel that takes or refuses what is written.

A file can't refuse a write, so the kernel looks at its files now and then: what it can't take it
sets back, as a reader then sees. Limits of a clock must not cross; the first core stays on; the
clock of a group of cores vanishes with the last of them; memory's clock moves only when locked.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.boards.board import Board
from terrazzo.boards.sensors import put

CPU = "sys/devices/system/cpu"
DEVFREQ = "sys/class/devfreq/17000000.gpu"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
EMC_RATES = "sys/kernel/debug/bpmp/debug/emc/possible_rates"
CONF = "etc/nvpmodel.conf"
GOVERNORS = {"cpu": "performance powersave schedutil userspace", "gpu": "nvhost_podgov performance"}


@dataclass
class Kernel:
    """What a board's kernel has accepted, by the path of each file."""

    board: Board
    root: Path
    good: dict[str, str] = field(default_factory=dict)
    stubborn: set[str] = field(default_factory=set)
    """Ends of paths whose writes are all refused."""

    def __post_init__(self) -> None:
        board = self.board
        for core in range(board.cores):
            if core:
                self._make(f"{CPU}/cpu{core}/online", "1")
            (self.root / f"{CPU}/cpu{core}").mkdir(parents=True, exist_ok=True)
        put(self.root / CPU / "possible", f"0-{board.cores - 1}")
        for policy in self._policies:
            self._make_policy(policy)
        if board.gpu is not None:
            self._make_devfreq()
        if board.memory is not None:
            put(self.root / EMC_RATES, " ".join(f"{hz / 1e3:.0f}" for hz in board.memory.hz))
            self._make(f"{EMC}/mrq_rate_locked", "0")
            self._make(f"{EMC}/rate", f"{board.memory.hz[-1]:.0f}")
        if board.presets:
            put(self.root / CONF, nvpmodel(board))
        if board.tree == "jetson":
            put(self.root / "proc/device-tree/model", f"Simulated {board.name}\0")
            put(self.root / "proc/device-tree/compatible", "nvidia,tegra234\0")

    @property
    def _policies(self) -> range:
        return range(0, self.board.cores, self.board.cluster)

    def _make(self, path: str, text: str) -> None:
        self.good[path] = text
        put(self.root / path, text)

    def _make_policy(self, policy: int) -> None:
        clock, folder = self.board.cpu, f"{CPU}/cpufreq/policy{policy}"
        low, high = (f"{hz / 1e3:.0f}" for hz in (clock.hz[0], clock.hz[-1]))
        cores = " ".join(str(policy + core) for core in range(self.board.cluster))
        fixed = {
            "related_cpus": cores,
            "scaling_available_frequencies": " ".join(f"{hz / 1e3:.0f}" for hz in clock.hz),
            "scaling_available_governors": GOVERNORS["cpu"],
            "cpuinfo_min_freq": low,
            "cpuinfo_max_freq": high,
        }
        for name, text in fixed.items():
            put(self.root / folder / name, text)
        for name, text in (
            ("scaling_min_freq", low), ("scaling_max_freq", high), ("scaling_governor", "schedutil")
        ):  # fmt: skip
            self._make(f"{folder}/{name}", self.good.get(f"{folder}/{name}", text))

    def _make_devfreq(self) -> None:
        assert self.board.gpu is not None
        hz = [f"{value:.0f}" for value in self.board.gpu.hz]
        put(self.root / DEVFREQ / "available_frequencies", " ".join(hz))
        put(self.root / DEVFREQ / "available_governors", GOVERNORS["gpu"])
        for name, text in (
            ("min_freq", hz[0]), ("max_freq", hz[-1]), ("governor", "nvhost_podgov")
        ):  # fmt: skip
            self._make(f"{DEVFREQ}/{name}", text)

    # ---- what was written ----------------------------------------------------------------

    def poll(self) -> None:
        """Takes or sets back all that was written since."""
        for path in list(self.good):
            file = self.root / path
            if not file.exists():
                continue
            text = file.read_text(encoding="ascii").strip()
            if text == self.good[path]:
                continue
            taken = None if path.endswith(tuple(self.stubborn)) else self._taken(path, text)
            if taken is None:
                put(file, self.good[path])
            else:
                self.good[path] = taken
                put(file, taken)
        self._cores()
        self._show()

    def _taken(self, path: str, text: str) -> str | None:
        """What a write becomes; None: refused."""
        folder, _, name = path.rpartition("/")
        if name in ("online", "mrq_rate_locked"):
            return text if text in ("0", "1") else None
        if name.endswith("governor"):
            kind = "cpu" if name.startswith("scaling") else "gpu"
            return text if text in GOVERNORS[kind].split() else None
        if not text.isdigit():
            return None
        if folder == EMC:
            assert self.board.memory is not None
            locked = self.good[f"{EMC}/mrq_rate_locked"] == "1"
            return text if locked and float(text) in self.board.memory.hz else None
        kilo = 1e3 if folder.startswith(CPU) else 1.0
        clock = self.board.cpu if folder.startswith(CPU) else self.board.gpu
        assert clock is not None
        nearest = min(clock.hz, key=lambda hz: abs(hz - float(text) * kilo))
        prefix = "scaling_" if folder.startswith(CPU) else ""
        low, high = (float(self.good[f"{folder}/{prefix}{end}_freq"]) for end in ("min", "max"))
        value = nearest / kilo
        crossed = value > high if "min" in name else value < low
        return None if crossed else f"{value:.0f}"

    def _cores(self) -> None:
        """The clock of a group of cores comes and goes with them."""
        for policy in self._policies:
            folder = self.root / f"{CPU}/cpufreq/policy{policy}"
            on = any(self._on(policy + core) for core in range(self.board.cluster))
            if on and not folder.exists():
                self._make_policy(policy)
            elif not on and folder.exists():
                shutil.rmtree(folder)

    def _on(self, core: int) -> bool:
        return core == 0 or self.good[f"{CPU}/cpu{core}/online"] == "1"

    def _show(self) -> None:
        mode = self.mode()
        for policy in self._policies:
            folder = self.root / f"{CPU}/cpufreq/policy{policy}"
            if folder.exists():
                put(folder / "scaling_cur_freq", f"{mode['cpu_hz'] / 1e3:.0f}")
        if self.board.gpu is not None:
            put(self.root / DEVFREQ / "cur_freq", f"{mode['gpu_hz']:.0f}")

    def mode(self) -> dict[str, float]:
        """The mode that the board is in: a governor under load goes to its upper limit."""
        on = sum(self._on(core) for core in range(self.board.cores))
        found = {"cores": float(on), "gpu_hz": 0.0, "mem_hz": 0.0}
        found["cpu_hz"] = float(self.good[f"{CPU}/cpufreq/policy0/scaling_max_freq"]) * 1e3
        if self.board.gpu is not None:
            found["gpu_hz"] = float(self.good[f"{DEVFREQ}/max_freq"])
        if self.board.memory is not None:
            found["mem_hz"] = float(self.good[f"{EMC}/rate"])
        return found


def nvpmodel(board: Board) -> str:
    """The presets as the vendor's configuration file has them, one of which needs a reboot."""
    lines = [
        "# Simulated. The layout is that of nvpmodel.conf.",
        "< PARAM TYPE=FILE NAME=CPU_ONLINE >",
        "CORE_1 /sys/devices/system/cpu/cpu1/online",
        "",
    ]
    for number, (name, mode) in enumerate(board.presets):
        lines.append(f"< POWER_MODEL ID={number} NAME={name} >")
        lines += [
            f"CPU_ONLINE CORE_{core} {int(core < mode['cores'])}" for core in range(board.cores)
        ]
        for policy in range(0, board.cores, board.cluster):
            lines.append(f"CPU_A78_{policy} MIN_FREQ {board.cpu.hz[0] / 1e3:.0f}")
            lines.append(f"CPU_A78_{policy} MAX_FREQ {_or_all(mode['cpu_hz'] / 1e3, number)}")
        lines += ["GPU MIN_FREQ 0", f"GPU MAX_FREQ {_or_all(mode['gpu_hz'], number)}"]
        lines += [f"EMC MAX_FREQ {mode['mem_hz']:.0f}" if number else "EMC MAX_FREQ 0"]
        lines += ["TPC_POWER_GATING TPC_PG_MASK 252", ""]
    lines += [f"< POWER_MODEL ID={len(board.presets)} NAME=REBOOT_7W >", "GPU MAX_FREQ 408000000"]
    lines += ["TPC_POWER_GATING TPC_PG_MASK 254", "", "< PM_CONFIG DEFAULT=1 >"]
    return "\n".join(lines)


def _or_all(value: float, number: int) -> str:
    """The first preset sets no limits, which is written as -1."""
    return f"{value:.0f}" if number else "-1"

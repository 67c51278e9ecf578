"""The files of a simulated board, as tests of knobs look at them."""

from __future__ import annotations

from terrazzo.boards import Rig
from terrazzo.boards.kernel import CPU, DEVFREQ, EMC

LOW = {"cores": 2.0, "cpu_hz": 729.6e6, "gpu_hz": 306e6, "mem_hz": 665.6e6}


def tree(rig: Rig) -> dict[str, str]:
    """All that a kernel was told, and whether its clocks are there."""
    return {
        str(path.relative_to(rig.root)): path.read_text()
        for folder in (CPU, DEVFREQ, EMC)
        for path in (rig.root / folder).rglob("*")
        if path.is_file()
    }

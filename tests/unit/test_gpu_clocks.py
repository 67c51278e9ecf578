"""Clocks of a desktop GPU: locked, read back and let go, against a library with NVML's functions.

No GPU's clock was ever changed by these tests: the calls and their arguments are real, what they do
is the stand-in's.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from terrazzo.errors import KnobError
from terrazzo.power.keeper import Keeper
from terrazzo.power.lockedclock import LockedClock
from terrazzo.power.panel import Panel
from terrazzo.records.modes import Mode

LIBRARY = r"""
#include <stddef.h>
static unsigned core = 1980, memory = 2619;  /* as the driver moves them under load */
static unsigned locked[2];
static const unsigned mems[] = {2619, 1593}, cores[] = {1980, 1755, 1500, 345};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(size_t)(7 + i); return 0; }
static int list(unsigned *n, unsigned *out, const unsigned *in, unsigned size) {
    if (*n < size) return 7;
    *n = size;
    for (unsigned i = 0; i < size; i++) out[i] = in[i];
    return 0; }
int nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *n, unsigned *mhz) {
    return UNKNOWN ? 3 : list(n, mhz, mems, 2); }
int nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory, unsigned *n, unsigned *mhz) {
    return memory == 2619 ? list(n, mhz, cores, 4) : 2; }
int nvmlDeviceGetClockInfo(void *h, unsigned kind, unsigned *mhz) {
    unsigned at = kind == 2 ? memory : core, hold = locked[kind == 2];
    *mhz = hold && !DEAF ? hold : at;
    return 0; }
int nvmlDeviceSetGpuLockedClocks(void *h, unsigned low, unsigned high) {
    if (low != high || h != (void *)7) return 2;
    if (low == 345) return 4;
    locked[0] = low; return 0; }
int nvmlDeviceResetGpuLockedClocks(void *h) { locked[0] = 0; return 0; }
int nvmlDeviceSetMemoryLockedClocks(void *h, unsigned low, unsigned high) {
    locked[1] = low; return 0; }
int nvmlDeviceResetMemoryLockedClocks(void *h) { locked[1] = 0; return 0; }
"""


def library(folder: Path, **flags: int) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: locked clocks of NVML are NOT tested here")
    settings = {"UNKNOWN": 0, "DEAF": 0} | flags
    source, target = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(LIBRARY)
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run(["cc", "-shared", "-fPIC", *defined, str(source), "-o", str(target)], check=True)
    return str(target)


def now(panel: Panel) -> dict[str, float]:
    """What the library itself says."""
    return {knob.name: knob.gpu.clock_hz(knob.kind) for knob in panel.parts}


def test_clocks_are_locked_and_let_go(tmp_path):
    panel = Panel(tuple(LockedClock.find(library(tmp_path))))
    assert panel.knobs == {
        "mem_hz": (1593e6, 2619e6), "gpu_hz": (345e6, 1500e6, 1755e6, 1980e6)
    }  # fmt: skip
    assert panel.governors == {"mem_hz": "the driver", "gpu_hz": "the driver"}
    assert dict(panel.read().values) == {"mem_hz": 2619e6, "gpu_hz": 1980e6}
    free = now(panel)
    with Keeper(tmp_path / "state.json").borrowed(panel):
        calm = {"mem_hz": 1593e6, "gpu_hz": 1500e6}
        panel.apply(Mode.of(calm))
        assert now(panel) == calm == dict(panel.read().values)
        assert panel.governors == {}
    assert now(panel) == free
    assert panel.governors.keys() == free.keys()


def test_what_a_killed_process_locked_is_let_go(tmp_path):
    panel = Panel(tuple(LockedClock.find(library(tmp_path))))
    free, saved = now(panel), panel.state()
    panel.apply(Mode.of({"gpu_hz": 1500e6}))
    fresh = Panel(tuple(LockedClock.find(str(tmp_path / "libnvml.so"))))
    assert now(fresh)["gpu_hz"] == 1500e6
    fresh.restore(saved)
    assert now(fresh) == free


def test_without_permission_nothing_stays_locked(tmp_path):
    panel = Panel(tuple(LockedClock.find(library(tmp_path))))
    free = now(panel)
    with pytest.raises(KnobError, match=r"GPU 0: no gpu_hz of 3.45e\+08: .*no permission"):
        panel.apply(Mode.of({"mem_hz": 1593e6, "gpu_hz": 345e6}))
    assert now(panel) == free


def test_a_driver_that_takes_no_notice_is_found_out(tmp_path):
    panel = Panel(tuple(LockedClock.find(library(tmp_path, DEAF=1))))
    with pytest.raises(KnobError, match="told 1500 MHz and says 1980 MHz"):
        panel.apply(Mode.of({"gpu_hz": 1500e6}))
    assert panel.governors == {"mem_hz": "the driver", "gpu_hz": "the driver"}


def test_a_gpu_that_tells_no_clocks_has_no_such_knobs(tmp_path):
    assert LockedClock.find(library(tmp_path, UNKNOWN=1)) == []
    assert LockedClock.find("libthereisnone.so") == []

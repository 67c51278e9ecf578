"""NVML: its calls, against a library that has its functions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from terrazzo.errors import KnobError
from terrazzo.meters import nvml

NVML_STUB = r"""
#include <stddef.h>
int broken = BROKEN;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(size_t)(7 + i); return 0; }
static unsigned long long joules = 5000;
static unsigned limit = 300000;
#if BROKEN < 3
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
    if (broken || h != (void *)7) return 3;
    *mj = joules += 25000; return 0; }
#endif
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
    if (broken == 2) return 3;
    *mw = 250000; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned kind, unsigned *c) { *c = 61 + kind; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) {
    *bits = 0x24; return broken ? 3 : 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { b[0] = 'X'; b[1] = 0; return 0; }
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) { *mw = limit; return 0; }
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *l, unsigned *u) {
    *l = 100000; *u = 350000; return 0; }
int nvmlDeviceSetPowerManagementLimit(void *h, unsigned mw) {
    if (mw == 150000) return 4;
    limit = mw; return 0; }
"""


def stub(folder: Path, broken: int) -> str:
    """A library with NVML's functions: the calls, their arguments and answers are real."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: calls of NVML are NOT tested here")
    source, library = folder / f"nvml{broken}.c", folder / f"libnvml{broken}.so"
    source.write_text(NVML_STUB)
    command = ["cc", "-shared", "-fPIC", f"-DBROKEN={broken}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return str(library)


def test_nvml_counts_or_tells_its_power_or_is_left_out(tmp_path):
    (meter,) = nvml.probe(stub(tmp_path, 0))
    first, second = meter.read().joules, meter.read().joules
    assert second - first == pytest.approx(25.0)
    assert meter.gpu.title == "X"
    (meter,) = nvml.probe(stub(tmp_path, 1))
    assert meter.read().watts == pytest.approx(250.0)
    assert nvml.probe(stub(tmp_path, 2)) == []  # as on a Jetson: it initialises, and that is all
    assert nvml.probe("libthereisnone.so") == []
    (meter,) = nvml.probe(stub(tmp_path, 3))  # an old driver, without a counter
    assert meter.read().watts == pytest.approx(250.0)


def test_nvml_limits_are_checked(tmp_path):
    gpu = nvml.probe(stub(tmp_path, 0))[0].gpu
    gpu.set_limit_w(200.0)
    assert gpu.limit_w() == 200.0
    with pytest.raises(KnobError, match="100 to 350 W"):
        gpu.set_limit_w(90.0)
    with pytest.raises(KnobError, match="permission"):
        gpu.set_limit_w(150.0)


def test_nvml_tells_of_heat_and_what_slows_a_gpu_down(tmp_path):
    (words,) = nvml.heat(stub(tmp_path, 0))
    assert words == "GPU 0 61 degrees C, held by its power limit, slowed for heat"
    assert nvml.heat(stub(tmp_path, 2)) == nvml.heat("libthereisnone.so") == []

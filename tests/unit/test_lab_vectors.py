"""The width of a device's vectors: what its libraries are told, and that they keep to it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from terrazzo.lab import vectors

pytestmark = pytest.mark.timeout(60)
LOOK = """
import torch
print(torch.backends.cpu.get_cpu_capability())
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON), torch.no_grad():
    torch.conv2d(torch.ones(1, 64, 24, 24), torch.ones(64, 64, 3, 3), padding=1)
"""


def libraries(bits: int) -> str:
    """What a process says of its vectors that was told to keep to so many bits."""
    environment = {**os.environ, **vectors.environment(bits)}
    command = [sys.executable, "-c", LOOK]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has wider vectors than boards")
@pytest.mark.parametrize(
    ("bits", "aten", "kernels"), [(128, "AVX2", "sse41"), (256, "AVX2", "avx2")]
)
def test_libraries_keep_to_the_width(bits: int, aten: str, kernels: str) -> None:
    said = libraries(bits)
    assert said.splitlines()[0] == aten
    (run,) = [line for line in said.splitlines() if "exec,cpu,convolution" in line]
    assert f":{kernels}," in run


def test_as_wide_as_this_machine_is_nothing_to_say() -> None:
    assert vectors.environment(0) == vectors.environment(512) == {}


def test_arm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert vectors.environment(128) == {}

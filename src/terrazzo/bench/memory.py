"""One device with little memory: U-Net at 1024x1024, plain and under a limit, in turns."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import terrazzo as tz
from terrazzo.errors import RunError
from terrazzo.zoo import build

SIZE = 1024
LIMIT = "1000MiB"
STEPS = 3
MIB = 1 << 20


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in text.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def worker(limit: str) -> dict[str, float]:
    """A few steps in a fresh process: peak above what it held before the first, and seconds."""
    torch.manual_seed(0)
    model, x = build("unet32"), torch.randn(1, 3, SIZE, SIZE)
    net = tz.parallelize(model, (x,), memory=limit) if limit else model
    gc.collect()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts the peak anew
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        torch.autograd.backward(net(x).square().mean())
        seconds.append(time.perf_counter() - begin)
        net.zero_grad(set_to_none=True)
    peak = resident_bytes("VmHWM") - before
    return {"peak_bytes": peak, "step_s": statistics.median(seconds)}


def run(limit: str) -> dict[str, float]:
    """The worker in a process of its own: memory once used may stay with a process."""
    command = [sys.executable, "-m", "terrazzo.bench.memory", limit]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"the memory benchmark failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1])))

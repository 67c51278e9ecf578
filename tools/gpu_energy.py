"""Energy of a real GPU: its own counter beside the integral of its power samples. Read only.

    python tools/gpu_energy.py --seconds 20

Three windows: idle, steady work, and work that comes and goes. No clock and no limit is changed.
Exit status 0: every window agrees within the limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from terrazzo.meters.nvml import Nvml, NvmlGpu, NvmlMeter
from terrazzo.meters.sampler import Sampler

LIMIT = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    gpu = Nvml().gpus()[0]
    print(f"{gpu.title}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"limit {gpu.limit_w():.0f} W of {gpu.limits_w()[0]:.0f} to {gpu.limits_w()[1]:.0f} W")
    work = workload()
    patterns: dict[str, Callable[[float], None]] = {
        "idle": lambda _: time.sleep(0.05),
        "steady": lambda _: work(),
        "on and off": lambda at_s: work() if int(at_s) % 2 else time.sleep(0.05),
    }
    rows = [window(gpu, name, step, options.seconds) for name, step in patterns.items()]
    rows.append(cost(gpu))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    apart = [abs(float(row["apart"])) for row in rows if "apart" in row]
    return 0 if max(apart) <= LIMIT else 1


def workload() -> Callable[[], None]:
    """Convolutions, forward and backward, about a tenth of a second of them."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(64, 128, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(128, 128, 3, padding=1),
    ).cuda()  # fmt: skip
    pictures = torch.randn(32, 64, 128, 128, device="cuda")

    def work() -> None:
        end_s = time.monotonic() + 0.1
        while time.monotonic() < end_s:
            net(pictures).square().mean().backward()
            torch.cuda.synchronize()

    work()
    return work


def window(
    gpu: NvmlGpu, name: str, step: Callable[[float], None], seconds: float
) -> dict[str, float | str]:
    """Both meters over the same time. Work goes on for a while first: power is told as a mean
    over about a second, and so is late."""
    for at_s in range(30):
        step(at_s / 10)
    counter = Sampler([NvmlMeter(gpu, True)])
    power = Sampler([NvmlMeter(gpu, False)])
    with counter, power:
        begun = counter.begin(), power.begin()
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            step(time.monotonic() - began_s)
        counted, integrated = counter.end(begun[0]), power.end(begun[1])
    apart = integrated.joules / counted.joules - 1
    print(
        f"{name:>10}: {counted.seconds:5.1f} s, counter {counted.joules:8.1f} J "
        f"({counted.mean_w:6.1f} W), samples {integrated.joules:8.1f} J, apart {apart:+.2%}"
    )
    return {
        "window": name,
        "seconds": counted.seconds,
        "counter_j": counted.joules,
        "integrated_j": integrated.joules,
        "mean_w": counted.mean_w,
        "peak_w": integrated.peak_w,
        "apart": apart,
    }


def cost(gpu: NvmlGpu) -> dict[str, float | str]:
    """Processor time of a reading, at ten a second."""
    meter, count = NvmlMeter(gpu, True), 200
    begin_s = time.process_time()
    for _ in range(count):
        meter.read()
    share = (time.process_time() - begin_s) / count / meter.interval_s
    print(f"   reading: {share:.3%} of a core at {1 / meter.interval_s:.0f} a second")
    return {"window": "cost", "share_of_a_core": share}


if __name__ == "__main__":
    sys.exit(main())

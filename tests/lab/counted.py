"""A training that stands still before and after its measured steps, and says what it has sent."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import terrazzo as tz
from terrazzo.zoo import build

STEPS = 3


def main() -> None:
    folder = Path(sys.argv[1])
    device = tz.init(timeout_s=60)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    net = tz.parallelize(build("yolov2-small"), (x,), layout="tiles:2x1", groups=2)

    def step() -> None:
        torch.autograd.backward(net(x).square().mean())
        net.zero_grad()

    def stand(name: str) -> None:
        print(name, net.links.counters.total_bytes, flush=True)
        while not (folder / name).exists():
            time.sleep(0.01)

    step()  # buffers, connections, plans
    stand(f"before-{device}")
    for _ in range(STEPS):
        step()
    stand(f"after-{device}")


if __name__ == "__main__":
    main()

"""A training whose held samples fill its device, until a step needs much more than all before."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import terrazzo as tz

MIB = 1 << 20
SAMPLES, STEPS = 240, 30
"""A sample says its number in every byte."""


class Slow(Dataset[Any]):
    """Samples of 1 MiB that take a while, so that holding them pays."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)
        return torch.full((MIB,), index, dtype=torch.uint8), index


def held_bytes(net: tz.Net) -> int:
    found: int = net.__dict__["_stock"].held_bytes
    return found


def main() -> None:
    grows_mib = int(sys.argv[1])
    torch.set_num_threads(1)
    tz.init()
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(2, 3, 8, 8),))
    data, right = Slow(), 0
    for epoch in range(4):
        options: dict[str, Any] = {"batch_size": 8, "workers": 1, "cache": SAMPLES * MIB}
        for number, (x, y) in enumerate(tz.feed(data, net, **options)):
            right += torch.equal(x[:, 7], y.to(torch.uint8))
            if epoch == 3 and number == STEPS // 2:
                before = held_bytes(net)
                step = torch.empty(grows_mib * MIB, dtype=torch.uint8).fill_(1)
                del step
                print("held", before // MIB, held_bytes(net) // MIB, flush=True)
    print("right", right, flush=True)


if __name__ == "__main__":
    main()

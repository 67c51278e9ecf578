"""One device of the recording benchmark: the share of a step that goes into its record."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import terrazzo as tz
from terrazzo.runtime.recorder import Recorder
from terrazzo.zoo import build

STEPS = 20
TIMED = ("begin", "end", "span")


class TimedRecorder(Recorder):
    """Adds up what its own calls take, which steps timed in turns would bury in noise."""

    spent_s = 0.0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in TIMED:
            return found

        def timed(*args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            found(*args, **kwargs)
            self.spent_s += time.perf_counter() - begin

        return timed


def main() -> None:
    answer = Path(sys.argv[1])
    device = tz.init(timeout_s=60)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 320, 320)
    net = tz.parallelize(build("yolov2-small"), (x,))
    net.links.recorder = recorder = TimedRecorder(answer.parent / "record", device)
    torch.autograd.backward(net(x).square().mean())
    recorder.spent_s, begin = 0.0, time.perf_counter()
    for _ in range(STEPS):
        torch.autograd.backward(net(x).square().mean())
    share = recorder.spent_s / (time.perf_counter() - begin)
    if device == 0:
        answer.write_text(json.dumps(share), encoding="utf-8")


if __name__ == "__main__":
    main()

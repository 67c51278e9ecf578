"""One device of the payload benchmark: counts the bytes of a step beside the prediction."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import terrazzo as tz
from terrazzo.schedule import traffic
from terrazzo.zoo import resnet18


def main() -> None:
    answer, layout, groups = sys.argv[1:]
    device = tz.init(timeout_s=60)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    net = tz.parallelize(resnet18(classes=10), (x,), layout=layout, groups=groups)
    counters = net.links.counters
    before = counters.sent_bytes, counters.summed_bytes
    torch.autograd.backward(net(x).sum())
    sent = counters.sent_bytes - before[0] + counters.summed_bytes - before[1]
    trained = frozenset(v.name for v in net.program.graph.values.values() if v.kind == "parameter")
    predicted = traffic(net.program, net.carriers(trained))
    expected = predicted.sent_bytes[device] + predicted.summed_bytes[device]
    rows = net.links.gather(torch.tensor([sent, expected]), counted=False)
    if device == 0:
        Path(answer).write_text(json.dumps(rows.tolist()), encoding="utf-8")


if __name__ == "__main__":
    main()

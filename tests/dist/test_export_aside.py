"""Exporting leaves nothing on the device that does it: it has as much for a step as the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from script import meeting

MIB = 1 << 20
KEPT_BYTES = 16 * MIB
"""What one device may hold beyond the other: the modules behind an export are 40 MiB and more."""
SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
import terrazzo as tz
from terrazzo.runtime.aside import LOADED

tz.init(timeout_s=100)
torch.manual_seed(0)
x = torch.randn(2, 3, 16, 16)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
net = tz.parallelize(model, (x,), layout="tiles")
net(x).sum().backward()
lines = Path("/proc/self/status").read_text().splitlines()
(own,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
print(LOADED in sys.modules, own)
"""


def test_who_exports_keeps_no_more_than_the_others(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in meeting(2)
    ]
    try:
        said = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = [out.split() for out, _ in said]
    assert [answer[:1] for answer in answers] == [["False"], ["False"]], said
    first, second = (int(answer[1]) for answer in answers)
    assert first - second < KEPT_BYTES

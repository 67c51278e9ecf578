"""Exporting in a child process: the same graph, and nothing of it stays."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
from torch import nn
from terrazzo.errors import ModelError
from terrazzo.graph.export import export
from terrazzo.runtime.aside import LOADED, export_aside

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = torch.tensor([2.0])

    def forward(self, x):
        return self.conv(x) * self.scale

class Endless(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

x = torch.randn(1, 3, 8, 8)
model = Scaled()
made = export_aside(model, (x,), {})
try:
    export_aside(Endless(), (x,), {})
except ModelError:
    print("refused")
print(LOADED in sys.modules)
own = export(model, (x,))
print(made.graph == own.graph, {k: v.tolist() for k, v in made.constants.items()}
      == {k: v.tolist() for k, v in own.constants.items()})
"""


def test_a_child_exports_the_same_and_leaves_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["refused", "False", "True", "True"], done.stderr

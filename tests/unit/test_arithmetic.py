"""TF32 is off inside of a net on a GPU, and a script finds its own choice again afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from terrazzo.runtime.arithmetic import full_float32

def chosen():
    parts = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    return [part.fp32_precision for part in parts]

{choice}
before = chosen()
with full_float32(torch.device("cpu")):
    assert chosen() == before, "a CPU has nothing to switch"
with full_float32(torch.device("cuda")):
    inside = chosen()
assert chosen() == before, (chosen(), before)
print(*before, *inside)
"""


@pytest.mark.parametrize(
    "choice",
    [
        "pass",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
)
def test_switched_off_and_back(choice: str) -> None:
    import torch

    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("TF32 was NOT tested: this torch cannot be asked for its precisions")
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(choice=choice)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    *before, convolutions, products = answer.stdout.split()
    assert "tf32" in before, "torch itself lets convolutions be rounded"
    assert "tf32" not in (convolutions, products)

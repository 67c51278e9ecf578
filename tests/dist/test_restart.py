"""The starter starts a lost device again, and it joins the others, to the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import assert_close, state
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SCRIPT = """
import os, signal, sys, time
import torch
from pathlib import Path
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import terrazzo as tz

me, out = tz.init(), Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)).double()
draw = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(8, 2, 12, 12, generator=draw, dtype=torch.float64))
loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
net = tz.parallelize(model, (torch.zeros(2, 2, 12, 12, dtype=torch.float64),), layout=sys.argv[2])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
run = tz.Run(net, optimizer, loader=loader, spare_every=2)
is_new = net.links.later is not None
for epoch in run.epochs(int(sys.argv[3])):
    for (x,) in run.feed():
        if run.steps == 3 and me == 1 and not is_new and (out / "kill").exists():
            (out / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.steps == 6:
            end_s = time.monotonic() + 60  # it takes a while to load torch
            while not is_new and not net.links.control.guests and time.monotonic() < end_s:
                time.sleep(0.05)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
state = {name: t.detach().clone() for name, t in net.state_dict().items()}
who = f"again-{me}" if is_new else str(me)
save_file(state, out / f"{who}.safetensors")
print("members", len(net.links.members), flush=True)
"""

RAISES = """
import torch
from torch import nn
import terrazzo as tz

me = tz.init()
x = torch.zeros(2, 2, 12, 12)
net = tz.parallelize(nn.Conv2d(2, 4, 3), (x,), layout="tiles:3x1")
for step in range(4):
    net(x).mean().backward()
    if me == 1 and step == 2:
        raise ValueError("bad pixel")
"""
EPOCHS = 3


def quiet() -> dict[str, Tensor]:
    """The same by plain PyTorch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    model = nn.Sequential(*layers).double()
    draw = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(8, 2, 12, 12, generator=draw, dtype=torch.float64))
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@pytest.mark.timeout(240)
def test_a_lost_device_is_started_again_and_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "kill").touch()
    words = ["--on", "3", "--run-dir", "run", "train.py", ".", "channels", str(EPOCHS)]
    command = [sys.executable, "-m", "terrazzo.cli", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device1 is started again, to join them" in done.stderr
    assert done.stdout.count("members 3") == 3, done.stdout + done.stderr
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert found[-1] == "again-1.safetensors", "it has the number it had"
    assert "(device1) has joined: 3 devices go on" in done.stderr
    for name in found:
        assert_close(load_file(tmp_path / name), quiet())
    assert not (tmp_path / "run" / "members.json").exists(), "it held a secret"


@pytest.mark.timeout(240)
def test_a_script_that_raises_is_named_and_the_others_say_why_they_end_in_a_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(RAISES)
    words = ["--on", "3", "--no-record", "train.py"]
    command = [sys.executable, "-m", "terrazzo.cli", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "terrazzo: error: device1 failed with exit status 1" in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("device0", "device2"))]
    why = "terrazzo: PeerLost: device 1 failed: ValueError: bad pixel"
    assert [line.split(" | ")[1] for line in said if "4 devices" not in line][-2:] == [why, why]
    assert not any("Traceback" in line for line in said)

"""Starting: the script of the front page under torchrun and terrazzo run, and terrazzo check."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script import Script

from terrazzo.errors import UsageError
from terrazzo.runtime.start import join

TERRAZZO = ("-m", "terrazzo.cli")

SCRIPT = """
import json, sys
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

device = tz.init(timeout_s=60)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
).double()
x, y = torch.randn(10, 3, 21, 17).double(), torch.randint(4, (10,))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

plain = "plain" in sys.argv
net = model if plain else tz.parallelize(model, (x[:4],))
losses = []
for epoch in range(2):
    for x, y in loader if plain else tz.feed(loader, net):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
sys.stdout.write(f"LOSSES {device} {json.dumps(losses)}\\n")  # at once: others write, too
sys.stdout.flush()
"""

MODELS = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2))

def chance():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.RReLU())
"""


def free_port() -> int:
    """Not one that the system hands out by itself: another test would get it before torchrun."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("a hundred ports in use")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, timeout=200
    )


def started(*command: str, folder: Path) -> str:
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses(text: str) -> dict[int, list[float]]:
    """What each device printed."""
    pairs = re.findall(r"LOSSES (\d+) (\[[^\]]*\])", text)  # lines may run together
    return {int(device): json.loads(numbers) for device, numbers in pairs}


@pytest.mark.timeout(400)
def test_the_same_script_prints_the_same_losses_however_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = losses(Script(tmp_path / "train.py", ["plain"], folder=tmp_path).finish())[0]
    assert len(plain) == 6
    assert plain[-1] < plain[0]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    port = ("--master-port", str(free_port()))
    texts = {
        "terrazzo run": started(*TERRAZZO, "run", "--on", "2", "train.py", folder=tmp_path),
        "torchrun": started(*torchrun, *port, "train.py", folder=tmp_path),
    }
    found = {way: losses(text) for way, text in texts.items()}
    assert [sorted(each) for each in found.values()] == [[0, 1], [0, 1]]
    for way, each in found.items():
        for device, numbers in each.items():
            assert numbers == pytest.approx(plain, rel=1e-10), f"{way}, device {device}"
    warned = [text.count("when one is lost the run ends") for text in texts.values()]
    assert warned == [0, 1], "once, and only where nobody starts a lost device again"
    assert "2 devices, started by torchrun:" in texts["torchrun"]


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "models.py").write_text(MODELS)
    return run(*TERRAZZO, "check", *arguments, folder=folder)


def test_check_says_exact(tmp_path: Path) -> None:
    done = check(tmp_path, "models.py:build", "--input", "2x3x27x19", "--on", "2")
    assert done.returncode == 0, done.stderr
    assert "exact on 2 devices" in done.stdout
    assert "NOT" not in done.stdout
    assert "100.0% of FLOPs" in done.stdout


def test_check_says_not_exact_when_asked_for_the_impossible(tmp_path: Path) -> None:
    done = check(
        tmp_path, "models.py:build", "--input", "2x3x27x19", "--on", "2", "--tolerance", "1e-30"
    )
    assert done.returncode == 1, done.stderr
    assert "NOT exact on 2 devices" in done.stdout


def test_check_passes_on_what_a_device_refuses(tmp_path: Path) -> None:
    done = check(tmp_path, "models.py:chance", "--input", "2x3x27x19", "--on", "1")
    assert done.returncode == 2
    assert "rrelu" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_cannot_find_the_model(tmp_path: Path) -> None:
    done = check(tmp_path, "models.py:nowhere", "--input", "2x3x27x19", "--on", "1")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_fails_under_run_gives_its_status_and_its_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nimport terrazzo as tz\nsys.exit(7 if tz.init(timeout_s=30) == 1 else 0)\n"
    )
    done = run(*TERRAZZO, "run", "--on", "2", "train.py", folder=tmp_path)
    assert done.returncode == 7
    assert "device1 failed" in done.stderr


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"WORLD_SIZE": "3"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "three"}, "'three'"),
        ({"RANK": "-1", "WORLD_SIZE": "3"}, "'-1'"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "from 0 to 2"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    environment: dict[str, str], word: str
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if "RANK" in environment else {}
    with pytest.raises(UsageError, match=re.escape(word)):
        join({**meeting, **environment}, timeout_s=1)


def test_alone_there_is_nothing_to_join() -> None:
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        join(environment, timeout_s=1)
    assert not torch.distributed.is_initialized()

"""Stopping and going on, on the same or other devices: the numbers of a run without a stop."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, cnn, state
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

EPOCHS, EVERY, STOP = 2, 3, 7
"""Four steps an epoch; stopped after the seventh, the last checkpoint is of the sixth."""


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(12, 3, 23, 17, generator=draw, dtype=torch.float64)
    y = torch.randint(5, (12,), generator=draw)
    order = torch.Generator().manual_seed(11)
    return DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, generator=order)


def made(layout: str) -> tuple[tz.Net, torch.optim.Optimizer, Any]:
    """Of cut weights, an optimiser with memory, and a schedule of its rate.

    No bias before a norm: its gradient is nought, of which Adam makes steps of rounding errors.
    """
    net = tz.parallelize(
        cnn(bias=False), (torch.zeros(3, 3, 23, 17, dtype=torch.float64),), layout=layout
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def trained(layout: str, folder: str, resume: bool, stop: int, adds: int = 1) -> dict[str, Any]:
    """``adds``: gradients of so many batches are added up."""
    net, optimizer, schedule = made(layout)
    own = f"{folder}/{net.links.device}"
    run = tz.Run(net, optimizer, schedule, loader=loader(), checkpoints=own, every=EVERY)
    begun = run.resume() if resume else 0
    seen = []
    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            loss = F.cross_entropy(net(x), y)
            if run.steps % adds == 0:
                optimizer.zero_grad()
            loss.backward()
            if (run.steps + 1) % adds == 0:
                optimizer.step()
                schedule.step()
            seen.append(y.tolist())
            if run.steps + 1 == stop:
                assert run.scribe is not None
                run.scribe.finish()
                return {"seen": seen}
    assert run.scribe is not None
    run.scribe.finish()
    whole = state(net)
    return {"begun": begun, "seen": seen, "state": whole if net.links.device == 0 else None}


@pytest.mark.parametrize("adds", [1, 4], ids=["each", "added-up"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((3, "channels:3"), (2, "tiles:2x1")),
        ((2, "samples:2"), (1, "whole")),
        ((2, "channels:2"), (3, "channels:3")),
    ],
    ids=["from cut weights to tiles", "from two devices to one", "from cut weights to others"],
)
def test_another_cluster_goes_on(
    tmp_path: Path, first: tuple[int, str], then: tuple[int, str], adds: int
) -> None:
    """The checkpoint that is gone on from lies, of four batches that are added up, behind two."""
    devices, layout = first
    whole = run_on(devices, trained, layout, str(tmp_path / "a"), False, 99, adds)[0]
    stopped = run_on(devices, trained, layout, str(tmp_path / "b"), False, STOP, adds)[0]
    assert stopped["seen"] == whole["seen"][:STOP]
    count, other = then
    gone_on = run_on(count, trained, other, str(tmp_path / "b"), True, 99, adds)[0]
    assert gone_on["begun"] == 6
    assert gone_on["seen"] == whole["seen"][6:], "no sample is lost or repeated"
    assert_close(gone_on["state"], whole["state"])


def test_another_training_in_the_same_folder(tmp_path: Path) -> None:
    """What it writes stays, and it goes on from that and not from the training before it."""
    for stop in (99, 5):
        run_on(1, trained, "whole", str(tmp_path), False, stop)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["before-1", "step-00000003"]
    assert run_on(1, trained, "whole", str(tmp_path), True, 99)[0]["begun"] == 3


def drawing(stop: int, saved: Any) -> tuple[Any, list[float]]:
    """The loop draws by itself, and a head outside of net is trained too."""
    torch.manual_seed(1)
    net, _, _ = made("whole")
    head = nn.Linear(5, 5).double()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1, momentum=0.9)
    run = tz.Run(net, optimizer, loader=loader())
    if saved is not None:
        torch.manual_seed(99)
        nn.init.zeros_(head.weight)
        run.load_state_dict(saved)
    seen = []
    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            if run.steps == stop:
                return run.state_dict(), seen
            loss = F.cross_entropy(head(net(x)), y) * torch.rand(()).item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return None, seen


def stopped_and_whole() -> tuple[list[float], list[float]]:
    whole = drawing(99, None)[1]
    saved, first = drawing(6, None)
    saved["data"]["position"] -= 1  # the batch that was handed out was not used
    return whole, first + drawing(99, saved)[1]


def test_what_the_loop_draws_and_a_head_outside_go_on() -> None:
    ((whole, both),) = run_on(1, stopped_and_whole)
    assert both == pytest.approx(whole, rel=1e-12)


def test_a_device_without_storage_receives_it(tmp_path: Path) -> None:
    """The first two devices write; after the first is replaced, the second has it."""
    run_on(3, trained, "tiles:3x1", str(tmp_path), False, STOP)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    newest = tmp_path / "1" / "step-00000006" / "model.safetensors"
    plain: nn.Module = cnn(bias=False)
    plain.load_state_dict(load_file(newest))
    for path in sorted((tmp_path / "0").glob("*/state.json")):
        path.unlink()
    found = run_on(3, trained, "tiles:3x1", str(tmp_path), True, 99)
    assert [one["begun"] for one in found] == [6, 6, 6]


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import terrazzo as tz

tz.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 2, 12, 12), torch.arange(8).float())
loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
net = tz.parallelize(model, (torch.zeros(2, 2, 12, 12),))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
run = tz.Run(net, optimizer, loader=loader, every=2)
for epoch in run.epochs(2):
    for x, y in run.feed():
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("batch", run.steps + 1, sorted(y.tolist()), flush=True)
        if run.steps + 1 == int(sys.argv[1]):
            sys.exit(3)
"""


def test_from_the_command_line(tmp_path: Path) -> None:
    """Stopped after the fifth step, on two devices; the fourth is saved, and one device goes on."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def terrazzo(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "terrazzo.cli", "run", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    first = terrazzo("--on", "2", "--run-dir", "one", "--grace", "20", "train.py", "5")
    assert first.returncode == 3, first.stderr
    assert "; go on with: terrazzo run --resume one" in first.stderr
    seen = batches_in(first.stdout)
    assert [number for number, _ in seen] == [1, 2, 3, 4, 5]
    again = terrazzo("--resume", "one", "--on", "1", "train.py", "99")
    assert again.returncode == 0, again.stderr
    rest = batches_in(again.stdout)
    assert [number for number, _ in rest] == [5, 6, 7, 8]
    assert rest[0] == seen[4], "the step that was lost is made again with the same batch"


def batches_in(output: str) -> list[tuple[int, str]]:
    """What device 0 told, in order."""
    lines = [line.partition("batch ")[2] for line in output.splitlines() if "device0" in line]
    return [(int(line.split()[0]), line) for line in lines if line]


def unwritable(folder: str) -> tuple[int, list[str]]:
    net, optimizer, _ = made("whole")
    (Path(folder) / "file").write_text("")
    run = tz.Run(net, optimizer, loader=loader(), checkpoints=f"{folder}/file/under", every=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in run.epochs(1):
            for x, y in run.feed():
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    return run.steps, [str(one.message) for one in told]


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    ((steps, told),) = run_on(1, unwritable, str(tmp_path))
    assert steps == 4
    assert any("checkpoint of step 2" in text and "could not be written" in text for text in told)

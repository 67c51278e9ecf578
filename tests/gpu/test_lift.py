"""Batches that arrive on a GPU, by either way, are those that were read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz
from terrazzo.feed.lift import PINNED, PLAIN, RUN_AHEAD, TRIED, Lift, lift_of
from terrazzo.feed.stalls import Stalls, fed_steps, stalls_of
from terrazzo.geometry import Box
from terrazzo.records.event import read_events
from terrazzo.runtime.part import Part
from terrazzo.runtime.recorder import Recorder

MIB = 1 << 20


def drawn(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randint(256, (4, 3, 64, 64), generator=draw, dtype=torch.uint8), torch.arange(4) + n)
        for n in range(count)
    ]


def test_batches_on_a_gpu_are_the_same_by_both_ways() -> None:
    right, lift, ways = drawn(3 * TRIED), Lift("cuda"), []
    kept = []
    for x, y in lift.batches(right):
        assert x.is_cuda
        assert y.is_cuda
        kept.append((x, y))  # buffers are used again while these are still held
        ways.append(lift.way)
        torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    assert ways[0] == PLAIN
    assert PINNED in ways
    for (x, y), (a, b) in zip(kept, right, strict=True):
        assert torch.equal(x.cpu(), a)
        assert torch.equal(y.cpu(), b)


def test_what_was_measured_counts_in_the_next_epoch() -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(4, 3, 8, 8),))
    right = drawn(6)
    for _ in range(3):
        for _ in lift_of(net, "cuda").batches(right):
            pass
    assert lift_of(net, "cuda").way == PINNED, "three steps of six are skipped: nine were plain"
    net.eval()
    assert lift_of(net, "cuda").way == PLAIN, "a test has steps of its own"


def pinned() -> Lift:
    """One that has just begun to try the other way."""
    lift = Lift("cuda")
    for _ in lift.batches(drawn(TRIED + 1)):
        pass
    assert lift.way == PINNED
    return lift


class Tagged(torch.Tensor):
    """As torchvision's tensors of boxes and masks."""


def test_what_is_more_than_its_elements_arrives_whole() -> None:
    lift = pinned()
    last = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    leaf = torch.rand(5, requires_grad=True)
    box = Box(((0, 1), (0, 3)))
    part = Part(torch.arange(3.0).reshape(1, 3), box, (2, 3))
    batch: Any = {
        "last": last, "cut": last[:, 1:], "one": torch.ones(1).expand(4), "none": torch.empty(0, 3),
        "leaf": leaf, "tagged": torch.rand(3).as_subclass(Tagged), "part": part, "name": "a",
    }  # fmt: skip
    (found,) = lift.batches([batch])
    for name in ("last", "cut", "one", "none", "leaf", "tagged"):
        assert found[name].is_cuda, name
        assert torch.equal(found[name].cpu(), batch[name]), name
    assert found["last"].is_contiguous(memory_format=torch.channels_last)
    assert found["leaf"].requires_grad
    assert isinstance(found["tagged"], Tagged)
    assert found["part"].box == box
    assert torch.equal(found["part"].tensor.cpu(), part.tensor)
    assert found["name"] == "a"


def test_a_script_runs_ahead_by_so_many_steps() -> None:
    """Work that is queued faster than it is done must not fill the GPU with waiting batches."""
    lift, size, count = pinned(), 32 * MIB, 16
    weight = torch.rand(4096, 4096, device="cuda")
    product = weight @ weight  # what the library wants for itself is there from now on
    batches = [torch.full((size,), n, dtype=torch.uint8) for n in range(count)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = []
    for x in lift.batches(batches):
        for _ in range(20):  # much longer than copying a batch takes
            torch.mm(weight, weight, out=product)
        found.append(x[:1].long())
        del x
    took = torch.cuda.memory_reserved() - before
    assert [int(one) for one in found] == list(range(count))
    assert took < (RUN_AHEAD + 3) * size, f"{took / MIB:.0f} MiB for batches of {size / MIB:.0f}"


def test_a_net_on_a_gpu_is_fed_with_workers() -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(256, (96, 3, 16, 16), generator=draw, dtype=torch.uint8)
    data = TensorDataset(x, torch.arange(96))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
    net = tz.parallelize(model, (torch.zeros(4, 3, 16, 16, device="cuda"),))
    loader = DataLoader(data, 4)
    found = []
    for _ in range(2):
        for pictures, numbers in tz.feed(loader, net, workers=2, device="cuda"):
            assert pictures.is_cuda
            net(pictures.float() / 255).sum().backward()
            found.append((pictures.cpu(), numbers.cpu()))
    for at, (pictures, numbers) in enumerate(found):
        first = 4 * at % 96
        assert torch.equal(numbers, torch.arange(first, first + 4))
        assert torch.equal(pictures, x[first : first + 4])


def spent(folder: Path, *, size: int, products: int, way: str) -> Stalls:
    """An average step of one that copies so many bytes and multiplies so often."""
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(1, 3, 8, 8),))
    lift = lift_of(net, "cuda")
    if way == PINNED:  # as if it had been found to be faster
        for _ in range(3):
            for _ in lift.batches(drawn(6)):
                pass
    assert lift.way == way
    weight = torch.rand(4096, 4096, device="cuda")
    product = weight @ weight
    torch.cuda.synchronize()
    net.links.recorder = recorder = Recorder(folder, 0)
    batches = [torch.zeros(size, dtype=torch.uint8) for _ in range(6)]
    for _ in tz.feed(batches, net, device="cuda"):
        for _ in range(products):
            torch.mm(weight, weight, out=product)
    recorder.flush()
    found = stalls_of(fed_steps(read_events(folder)))
    assert found is not None
    return found


@pytest.mark.parametrize("way", [PLAIN, PINNED])
def test_copying_is_told_apart_from_computing(way: str, tmp_path: Path) -> None:
    """A plain copy waits for the GPU, and that is computing; a large one really is copying."""
    computes = spent(tmp_path / "computes", size=1 << 10, products=200, way=way)
    assert computes.copy_s < 0.1 * computes.step_s
    copies = spent(tmp_path / "copies", size=256 * MIB, products=1, way=way)
    assert copies.copy_s > 0.5 * copies.step_s
    assert sum(seconds for _, seconds in copies.parts) == pytest.approx(copies.step_s)

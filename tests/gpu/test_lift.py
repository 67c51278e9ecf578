"""Batches that arrive on a GPU, by either way, are those that were read."""

from __future__ import annotations

import torch

from terrazzo.feed.lift import PINNED, TRIED, Lift


def test_batches_on_a_gpu_are_the_same_by_both_ways() -> None:
    draw = torch.Generator().manual_seed(1)
    right = [
        (torch.randint(256, (4, 3, 64, 64), generator=draw, dtype=torch.uint8), torch.arange(4) + n)
        for n in range(3 * TRIED)
    ]
    lift, ways = Lift("cuda"), []
    kept = []
    for x, y in lift.batches(right):
        assert x.is_cuda
        assert y.is_cuda
        kept.append((x, y))  # buffers are used again while these are still held
        ways.append(lift.way)
        torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    assert PINNED in ways
    for (x, y), (a, b) in zip(kept, right, strict=True):
        assert torch.equal(x.cpu(), a)
        assert torch.equal(y.cpu(), b)

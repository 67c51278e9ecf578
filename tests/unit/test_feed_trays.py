"""Batches lie where workers have put them, and nobody writes there while anybody sees them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from terrazzo.feed.form import ALIGNED_BYTES
from terrazzo.feed.process import fork
from terrazzo.feed.source import Options, Source
from terrazzo.feed.trays import KEPT, SPARE, TRAY_BYTES, TRAYS, Trays


def batch(number: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(number)
    x = torch.rand(3, 1000, generator=draw)
    return {"x": x, "y": torch.arange(number % 5), "z": x.half().t(), "name": "a"}


def hand_over(trays: Trays, number: int) -> Any:
    tray = trays.take()
    return trays.clear(trays.serve(batch(number), tray), tray)


def is_batch(found: dict[str, Any], number: int) -> bool:
    wanted = batch(number)
    same = [torch.equal(found[name], wanted[name]) for name in "xyz"]
    return all(same) and found["name"] == wanted["name"]


@pytest.fixture
def trays() -> Trays:
    return Trays()


def test_what_is_kept_stays_and_what_is_not_is_used_again(trays: Trays) -> None:
    kept = hand_over(trays, 0)
    places = set()
    for number in range(1, 20):
        found = hand_over(trays, number)
        places.add(found["x"].data_ptr())
        assert is_batch(found, number)
        found["x"].zero_()  # it is the loop's own
        del found
    assert len(places) == 1, "the same memory again and again"
    assert is_batch(kept, 0)


def test_a_part_of_a_batch_keeps_its_tray(trays: Trays) -> None:
    found = hand_over(trays, 1)
    part = found["z"][3:]
    del found
    hand_over(trays, 2)
    assert torch.equal(part, batch(1)["z"][3:])
    free = len(trays._free)
    del part
    assert len(trays._free) == free + 1


def test_tensors_of_a_batch_have_nothing_to_do_with_each_other(trays: Trays) -> None:
    found = hand_over(trays, 3)
    x, y = found["x"], found["y"]
    assert x.data_ptr() % ALIGNED_BYTES == y.data_ptr() % ALIGNED_BYTES == 0
    assert x.untyped_storage().nbytes() == x.nbytes, "saving one saves no other"
    before = y._version
    x.zero_()
    assert y._version == before


def test_a_batch_without_tensors_keeps_no_tray(trays: Trays) -> None:
    tray = trays.take()
    assert trays.clear(trays.serve(["text", 3], tray), tray) == ["text", 3]
    assert sorted(trays._free) == list(range(TRAYS))


def test_who_keeps_all_gets_copies_before_workers_have_no_trays(trays: Trays) -> None:
    kept = [hand_over(trays, number) for number in range(2 * TRAYS)]
    assert len(trays._free) >= SPARE - 1
    assert all(is_batch(found, number) for number, found in enumerate(kept))
    del kept
    gc.collect()
    assert sorted(trays._free) == list(range(TRAYS))
    begins = [tray * TRAY_BYTES for tray in trays._free]
    with_memory = sum(any(trays._memory[begin : begin + 64]) for begin in begins)
    assert with_memory <= KEPT + 1, "the memory of the others is the system's again"


def test_what_another_process_drops_stays_here(trays: Trays) -> None:
    kept = [hand_over(trays, number) for number in range(KEPT + 4)]
    fork(kept.clear, name="drops").join()
    assert all(is_batch(found, number) for number, found in enumerate(kept))


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((64,), float(index) ** 2), index


def test_batches_outlive_the_feed() -> None:
    source = Source(DataLoader(Squares(), batch_size=4), Options(workers=2))
    kept = list(source)
    assert source.pool is not None
    source.pool.close()
    del source
    gc.collect()
    for number, (x, y) in enumerate(kept):
        assert y.tolist() == [4 * number + place for place in range(4)]
        assert x[:, 5].tolist() == [float(one) ** 2 for one in y.tolist()]

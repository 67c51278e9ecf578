"""Memory of batches is taken again, and never while somebody sees it."""

from __future__ import annotations

import torch

from terrazzo.feed.form import freeze, thaw
from terrazzo.feed.shelf import LEAST_BYTES, MOST, Shelf


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    shelf = Shelf()
    first = shelf.take(LEAST_BYTES)
    place = first.data_ptr()
    view = first.view(torch.float32)[3:]
    view.fill_(7.0)
    del first
    other = shelf.take(LEAST_BYTES)
    assert other.data_ptr() != place, "a view of it is still there"
    other.zero_()
    assert bool((view == 7.0).all())
    del view
    assert shelf.take(LEAST_BYTES).data_ptr() == place


def test_only_some_of_it_is_kept() -> None:
    shelf = Shelf()
    held = [shelf.take(LEAST_BYTES) for _ in range(2 * MOST)]
    del held
    assert sum(len(free) for free in shelf._free.values()) == MOST


def test_a_batch_on_a_shelf_is_the_batch() -> None:
    shelf = Shelf()
    draw = torch.Generator().manual_seed(2)
    batch = {"x": torch.rand(70, 1000, generator=draw), "y": torch.arange(4), "name": "a"}
    data = freeze(batch)
    for _ in range(3):
        found = thaw(data, shelf)
        assert found["name"] == "a"
        assert torch.equal(found["x"], batch["x"])
        assert torch.equal(found["y"], batch["y"])
        found["x"].zero_()  # it is the loop's own

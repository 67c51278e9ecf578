"""Free memory is returned where a step would outgrow its room, and only there."""

from __future__ import annotations

import ctypes

import pytest

from terrazzo.runtime.allocator import LEAST_BYTES, Heap, Room, heap

MIB = 1 << 20
BLOCK = 1 * MIB


@pytest.fixture
def own() -> Heap:
    found = heap()
    if found is None:
        pytest.skip("NOT TESTED: this C library cannot be asked for its free memory")
    return found


class Blocks:
    """Memory of the C library, touched, with every second block free again: holes."""

    def __init__(self, count: int) -> None:
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        self.free = library.free
        self.free.argtypes = (ctypes.c_void_p,)
        self.places = [library.malloc(BLOCK) for _ in range(count)]
        for place in self.places:
            ctypes.memset(place, 1, BLOCK)

    def make_holes(self) -> None:
        for place in self.places[::2]:
            self.free(place)
        self.places = self.places[1::2]

    def drop(self) -> None:
        for place in self.places:
            self.free(place)


def test_what_is_in_use_is_counted(own: Heap) -> None:
    before = own.in_use_bytes()
    blocks = Blocks(32)
    assert own.in_use_bytes() - before == pytest.approx(32 * BLOCK, rel=0.1)
    blocks.make_holes()
    assert own.in_use_bytes() - before == pytest.approx(16 * BLOCK, rel=0.1)
    blocks.drop()


def test_holes_are_returned_only_where_they_are_too_much(own: Heap) -> None:
    Room(own, 0)  # sets the options of the allocator first
    own.trim()
    roomy, tight = Room(own, 512 * MIB).begin(), Room(own, 20 * MIB).begin()
    blocks = Blocks(64)
    blocks.make_holes()
    resident, trims = own.resident_bytes(), own.trims
    roomy.ease()
    assert own.trims == trims
    tight.ease()
    assert own.trims == trims + 1
    assert resident - own.resident_bytes() > 32 * BLOCK - LEAST_BYTES
    tight.ease()
    assert own.trims == trims + 1  # nothing idle is left to return
    blocks.drop()

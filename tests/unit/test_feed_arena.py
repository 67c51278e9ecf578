"""Memory that was given back and is used again is never taken for what lay there before."""

from __future__ import annotations

import sys
import threading

from terrazzo.feed.arena import Arena
from terrazzo.feed.form import ENCODED
from terrazzo.feed.held import Held
from terrazzo.feed.task import Made, Place

MIB = 1 << 20


def test_what_was_given_back_is_not_what_came_there_since() -> None:
    arena = Arena(MIB)
    first = arena.put(b"A" * 3000)
    assert first is not None
    arena.give_back(0)
    arena.allow(MIB)
    second = arena.put(b"B" * 3000)
    assert second is not None
    assert arena.get(first, 3000) is None
    assert arena.get(second, 3000) == b"B" * 3000
    arena.close()


def test_what_lost_only_its_end_is_lost() -> None:
    arena = Arena(MIB)
    places = [arena.put(b"A" * 3000) for _ in range(4)]
    arena.give_back(8192)
    arena.allow(MIB)
    arena.put(b"B" * 3000)
    found = [place is not None and arena.has(place, 3000) for place in places]
    assert found == [True, True, False, False]
    assert [arena.get(place or 0, 3000) is not None for place in places] == found
    arena.close()


def test_a_batch_that_was_on_its_way_tells_of_no_lost_places() -> None:
    arena = Arena(MIB)
    held = Held(arena, seed=0, samples=10)
    held.form = ENCODED
    late = arena.put(b"A" * 100)
    assert late is not None
    held.give_back(0)
    arena.allow(MIB)
    arena.put(b"B" * 100)
    held.note(Made(key=held.key, kept={1: Place(late, 100, ENCODED)}))
    assert len(held.places) == 0
    arena.close()


def test_threads_put_in_at_once_and_never_overlap() -> None:
    arena = Arena(16 * MIB)
    places: list[int | None] = []

    def fill() -> None:
        places.extend(arena.put(b"x" * 50) for _ in range(2000))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fill) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len({place & ((1 << 44) - 1) for place in places if place is not None}) == 8000
    arena.close()

"""Memory that runs out in the middle of a step is given back there, and nothing else is lost."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

from terrazzo.feed import guard as guard_module
from terrazzo.feed.arbiter import reserve_bytes
from terrazzo.feed.arena import Arena
from terrazzo.feed.guard import Guard
from terrazzo.feed.process import fork
from terrazzo.feed.stock import Stock
from terrazzo.runtime.ceiling import ceiling_bytes

sys.path.insert(0, str(Path(__file__).parent))
from patience import soon

MIB = 1 << 20


def watchers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "terrazzo-guard"]


def filled(count: int) -> tuple[Arena, list[int]]:
    arena = Arena(count * MIB * 2)
    places = [arena.put(bytes([number]) * MIB) for number in range(count)]
    return arena, [place for place in places if place is not None]


def test_what_is_held_makes_room_while_it_runs_out() -> None:
    arena, places = filled(32)
    whole, left = arena.used_bytes, [reserve_bytes(ceiling_bytes()) // 2]
    guard = Guard(lambda: left[0])
    guard.watch(arena)
    soon(lambda: arena.used_bytes < whole)
    left[0] *= 4
    assert arena.was_cut
    assert not arena.was_cut, "once"
    for number, place in enumerate(places):
        found = arena.get(place, MIB)
        assert found is None or found == bytes([number]) * MIB
    arena.close()


def test_where_there_is_room_nothing_goes() -> None:
    arena, places = filled(4)
    looked = threading.Event()

    def left() -> int:
        looked.set()
        return reserve_bytes(ceiling_bytes())

    guard = Guard(left)
    guard.watch(arena)
    assert looked.wait(20)
    time.sleep(0.1)
    assert all(arena.has(place, MIB) for place in places)
    assert not arena.was_cut
    arena.close()


def test_it_ends_when_there_is_nothing_to_watch() -> None:
    before = watchers()
    arena, _ = filled(1)
    guard = Guard(lambda: 0)
    guard.watch(arena)
    (mine,) = set(watchers()) - set(before)
    arena.close()  # while it is being asked for more
    del arena
    gc.collect()
    soon(lambda: not mine.is_alive())
    again, _ = filled(1)
    guard.watch(again)
    soon(lambda: again.used_bytes == 0)
    again.close()


def test_what_was_cut_off_is_known_to_be_gone() -> None:
    stock, data = Stock(), [0] * 8
    held = stock.held_of(data, asked_bytes=20 * MIB, seed=0, device=0)
    for index in range(8):
        place = held.arena.put(bytes(MIB))
        assert place is not None
        held.places.lay(index, place, MIB)
    assert held.arena.cut(3 * MIB) >= 3 * MIB
    assert stock.mind(held) > 0, "a user is told"
    assert 0 < len(held.places) < 8
    assert all(held.arena.has(*(held.places.find(index) or (0, 0))) for index in held.places)
    assert stock.mind(held) == 0


def test_a_worker_that_is_forked_while_it_gives_back_is_not_stopped_by_that() -> None:
    arena, _ = filled(2)
    with arena._locked():  # as another thread has it
        child = fork(_put, arena, name="forked")
        time.sleep(0.1)
    child.join(20)
    assert child.exitcode == 0
    arena.close()


def _put(arena: Arena) -> None:
    os._exit(0 if arena.put(bytes(MIB)) is not None else 1)


def test_it_looks_sooner_where_less_is_left() -> None:
    most = guard_module.FASTEST_BYTES_PER_S * guard_module.SOONEST_S
    assert most < guard_module.LOW * reserve_bytes(0), "what can be taken between two looks"

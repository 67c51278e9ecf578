"""Shortcuts through the worlds of the explorer: far fewer of them, and no end is missed.

Most worlds differ in something that nobody will ever notice, or in the order of two things that do
not touch each other. Each shortcut leaves such worlds out:

- *A device stages an operation as soon as it works.* Had it been alarmed before, nobody could have
  finished that operation; where all have staged it, nobody need finish it.
- *It finishes an operation just before it stops to work, or at the end.* Until then nobody sees
  whether it has. So whatever touches a device that could finish happens twice: to one that has, and
  to one that has not.
- *A crash, a pause or a cut happens just before somebody notices.* Until then the device does
  nothing, and what is sent to it is lost or waits, as it is then. One that nobody can notice
  happens where nothing else can. A device hangs just before it is noticed or does something else.
- *Ready counts when the last one has come.* A device that has only some of them does nothing with
  them, and an alarm clears them away.
- *What changes nothing, now or ever, is not sent*, and what a device that is dead or left behind
  remembers is forgotten, but for what the checks ask for.

``test_shortcuts_miss_no_end`` compares the ends with those of all worlds where these are few
enough. A world that was seen is remembered by 64 bits of a hash: among ten million, two are taken
for one with a chance of three in a million.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product

from explorer import (
    KNOWN,
    LAST,
    WORDS,
    Action,
    Scene,
    World,
    check,
    check_end,
    complete,
    happen,
    is_old,
    is_staged,
    misfortunes,
    patience,
    place,
    suspicions,
)

from terrazzo.members.council import Accept, Prepare, Ready, Seat

UNSEEN = ("crash", "pause", "cut", "hang")
"""What nobody knows of at first."""


# ---- the same world with less in it -----------------------------------------------------------


@cache
def settled(at: int) -> int:
    """A device that has staged what it works on."""
    own = KNOWN[at]
    now = (own.seat.view.epoch, own.done + 1)
    if own.works and own.done < LAST and own.staged != now:
        return place(own._replace(staged=now))
    return at


@cache
def remains(at: int, is_dead: bool) -> int:
    """A device without what it will never use again."""
    own = KNOWN[at]
    seat = own.seat
    if seat.is_out or (is_dead and not own.works):
        bare = Seat(seat.me, seat.view, alarmed=True, is_out=seat.is_out)
        return place(own._replace(seat=bare._replace(is_present=seat.is_present)))
    return at


@lru_cache(1 << 18)
def noticed(at: int, queue: tuple[int, ...]) -> tuple[int, ...]:
    """A queue without what will change nothing, wherever it stands."""
    return tuple(message for message in queue if not _changes_nothing(at, message))


@cache
def _changes_nothing(at: int, message: int) -> bool:
    seat, said = KNOWN[at].seat, WORDS[message]
    if is_old(seat, said):
        return True
    if said[0] != seat.view.epoch:
        return False
    if isinstance(said, Prepare):
        return said.ballot <= seat.promised
    if isinstance(said, Accept):
        return said.ballot < seat.promised
    return isinstance(said, Ready) and seat.alarmed


@cache
def _is_one_of_some(at: int, source: int, message: int) -> bool:
    """Whether this is a Ready, and not the last."""
    seat, said = KNOWN[at].seat, WORDS[message]
    if not isinstance(said, Ready) or said.epoch != seat.view.epoch or seat.alarmed:
        return False
    return not {*dict(seat.ready), source} >= set(seat.view.members)


def lean(world: World) -> World:
    scene, is_done = Scene(world), False
    while not is_done:
        for device, at in enumerate(scene.devices):
            scene.devices[device] = remains(settled(at), device in world.crashed)
        is_done = True
        for (source, target), queue in list(scene.queues.items()):
            queue = noticed(scene.devices[target], queue)
            while queue and _is_one_of_some(scene.devices[target], source, queue[0]):
                scene.act(target, "hear", source, queue[0])
                queue, is_done = queue[1:], False
            scene.queues[source, target] = queue
    return scene.frozen()


# ---- what can happen --------------------------------------------------------------------------


def touched(actions: tuple[Action, ...]) -> set[int]:
    """Who does something, or nothing any more."""
    acting = {"deliver": 2, "guest": 2, "cut": 0, "pause": 0}
    places = [(action, acting.get(action[0], 1)) for action in actions]
    return {action[place] for action, place in places if place}


def moves(world: World) -> Iterator[tuple[Action, ...]]:
    """What may happen at once: mostly one thing, or a misfortune and who notices it."""
    deeds = [*deliveries(world), *suspicions(world)]
    yield from ((deed,) for deed in deeds)
    yield from ((wait,) for wait in patience(world))
    troubles = list(misfortunes(world))
    for trouble in troubles:
        kind, one, _ = trouble
        if kind not in UNSEEN:
            yield (trouble,)
            continue
        signs = set(suspicions(happen(world, trouble))).difference(deeds)
        yield from ((trouble, sign) for sign in signs)
        if kind == "hang":
            seen = [other for other in troubles if other[0] not in UNSEEN]
            yield from ((trouble, deed) for deed in [*deeds, *seen] if touched((deed,)) == {one})
        if kind != "pause" and not signs and all(_is_missed(deed, trouble) for deed in deeds):
            yield (trouble,)


def _is_missed(deed: Action, trouble: Action) -> bool:
    """Whether it does not happen after the trouble, or does not matter."""
    kind, one, other = trouble
    if kind == "cut":
        return deed[0] == "deliver" and {*deed[1:]} == {one, other}
    return touched((deed,)) == {one}


def deliveries(world: World) -> list[Action]:
    return [("deliver", *pair) for pair, _ in world.queues if pair[1] not in world.paused]


def is_quiet(world: World) -> bool:
    return not (world.paused or deliveries(world) or list(suspicions(world)))


def follow(world: World, actions: tuple[Action, ...]) -> Iterator[World]:
    """The worlds after something, whether those it touches had finished or not."""
    able = [device for device in sorted(touched(actions)) if is_staged(world, device)]
    for choice in product((False, True), repeat=len(able)):
        after = world
        for device, has_finished in zip(able, choice, strict=True):
            if has_finished:
                after = happen(after, ("finish", device, device))
        for action in actions:
            after = happen(after, action)
        yield lean(after)


# ---- all of them ------------------------------------------------------------------------------


def walk(first: World, *, most: int) -> tuple[int, set[World]]:
    """Walks all worlds from a first one: how many there were, and where they end.

    Where nothing happens by itself any more is an end, whatever may still go wrong.
    """
    first = lean(first)
    seen, stack, ends = {hash(first)}, [first], set()
    while stack:
        world = stack.pop()
        check(world.devices)
        if is_quiet(world):
            end = complete(world)
            check_end(end, first)
            ends.add(end)
        for actions in moves(world):
            for following in follow(world, actions):
                mark = hash(following)
                if mark not in seen:
                    seen.add(mark)
                    stack.append(following)
        assert len(seen) <= most, f"more than {most} worlds: give it less to go wrong"
    return len(seen), ends

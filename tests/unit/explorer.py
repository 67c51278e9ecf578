"""Every way in which a small cluster can live through failures, looked at one by one.

A world is a few devices at work on one operation, connections that deliver in order until they are
cut, and a budget of things that go wrong. ``explore`` walks all worlds that can be reached and
checks each of them; where nothing can happen any more it lets patience run out fairly and checks
that those who may go on have done so.

What keeps the number of worlds small: a device stages an operation, and may finish it at any time
after all members of its view have staged it, so that commit notes on their way need no messages;
what a device does not react to is delivered at once; and what a device did in one state is
remembered for all worlds that it is in. ``shortcuts`` leaves out many more of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import chain, combinations
from typing import NamedTuple

from terrazzo.members.council import (
    Accepted,
    Alarm,
    Council,
    Decided,
    Message,
    Promise,
    Ready,
    Seat,
)
from terrazzo.members.view import View, goes_on

LAST = 1
"""How many operations there are."""


class Device(NamedTuple):
    seat: Seat
    done: int = 0
    staged: tuple[int, int] = (-1, 0)
    """The epoch and the number of the operation that was staged last."""

    @property
    def works(self) -> bool:
        seat = self.seat
        settled = seat.committed is not None and not seat.alarmed and not seat.is_out
        return settled and seat.is_present


class Budget(NamedTuple):
    """Things that may still go wrong; a mistake is a suspicion of somebody who is well, and who
    hangs still votes, but does nothing else any more."""

    crashes: int = 0
    pauses: int = 0
    cuts: int = 0
    mistakes: int = 0
    ticks: int = 0
    guests: int = 0
    hangs: int = 0


Queue = tuple[tuple[int, int], tuple[Message, ...]]


class World(NamedTuple):
    devices: tuple[int, ...]
    """Each as its place in ``KNOWN``: comparing two worlds compares a few small numbers."""
    queues: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    crashed: frozenset[int]
    paused: frozenset[int]
    cut: frozenset[tuple[int, int]]
    budget: Budget


Action = tuple[str, int, int]

KNOWN: list[Device] = []
WORDS: list[Message] = []
_PLACES: dict[Device, int] = {}
_WORD_PLACES: dict[Message, int] = {}


def place(device: Device) -> int:
    if device not in _PLACES:
        _PLACES[device] = len(KNOWN)
        KNOWN.append(device)
    return _PLACES[device]


def word(message: Message) -> int:
    """Messages of two kinds may hold the same numbers."""
    key = (type(message).__name__, message)
    if key not in _WORD_PLACES:
        _WORD_PLACES[key] = len(WORDS)
        WORDS.append(message)
    return _WORD_PLACES[key]


def begin(count: int, budget: Budget) -> World:
    """``count`` devices that belong together, and those who may come later."""
    view = View(0, tuple(range(count)), 0)
    ready = tuple((device, 0) for device in range(count))
    seats = [Seat(device, view, ready=ready) for device in range(count)]
    seats += [Seat(count + guest, View(-1, (), 0)) for guest in range(budget.guests)]
    nobody: frozenset[int] = frozenset()
    places = tuple(place(Device(seat)) for seat in seats)
    return World(places, (), nobody, nobody, frozenset(), budget)


@cache
def react(at: int, call: str, *args: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """What a device becomes when something happens to it, and what it sends."""
    own = KNOWN[at]
    council = Council(own.seat)
    given = (args[0], WORDS[args[1]]) if call == "hear" else args
    sends = list(getattr(council, call)(*given))
    if council.seat.view.epoch > own.seat.view.epoch and own.seat.is_present:
        sends += council.arrive(own.done)  # no operation is at work any more
    own = own._replace(seat=council.seat)
    committed = council.seat.committed
    if committed is not None and own.works and own.done < committed:
        guest = own.staged == (-1, 0)
        assert guest or own.staged[1] >= committed, f"{own} cannot follow to {committed}"
        own = own._replace(done=committed)
    return place(own), tuple((target, word(message)) for target, message in sends)


class Scene:
    """A world being changed."""

    def __init__(self, world: World) -> None:
        self.devices, self.queues = list(world.devices), dict(world.queues)
        self.crashed, self.paused, self.cut = world.crashed, world.paused, world.cut
        self.budget = world.budget

    def frozen(self) -> World:
        kept = ((pair, fresh(self.devices[pair[1]], queue)) for pair, queue in self.queues.items())
        queues = tuple(sorted(item for item in kept if item[1]))
        return World(tuple(self.devices), queues, self.crashed, self.paused, self.cut, self.budget)

    def spend(self, name: str) -> None:
        self.budget = self.budget._replace(**{name: getattr(self.budget, name) - 1})

    def sever(self, one: int, other: int) -> None:
        self.cut = self.cut | {(min(one, other), max(one, other))}
        self.queues.pop((one, other), None)
        self.queues.pop((other, one), None)

    def act(self, device: int, call: str, *args: int) -> None:
        self.devices[device], sends = react(self.devices[device], call, *args)
        self.send(device, sends)

    def send(self, source: int, sends: tuple[tuple[int, int], ...]) -> None:
        for target, message in sends:
            pair = (source, target)
            if target not in self.crashed and (min(pair), max(pair)) not in self.cut:
                self.queues[pair] = (*self.queues.get(pair, ()), message)


@lru_cache(1 << 18)
def fresh(at: int, queue: tuple[int, ...]) -> tuple[int, ...]:
    """A queue without what its device does not react to, now or ever: delivered in silence."""
    while queue and is_old(KNOWN[at].seat, WORDS[queue[0]]):
        queue = queue[1:]
    return queue


def is_old(seat: Seat, message: Message) -> bool:
    if seat.is_out:
        return True
    if isinstance(message, Decided):
        return message.view.epoch <= seat.view.epoch
    if isinstance(message, (Ready, Accepted, Promise, Alarm)) and message.epoch < seat.view.epoch:
        return True
    if message.epoch != seat.view.epoch:
        return False
    if isinstance(message, Promise):
        return message.ballot != seat.ballot or bool(seat.choice)
    if isinstance(message, Accepted):
        return message.ballot != seat.ballot
    return isinstance(message, Alarm) and seat.alarmed


def happen(world: World, action: Action) -> World:
    kind, one, other = action
    scene = Scene(world)
    if kind == "deliver":
        first, *rest = scene.queues[one, other]
        scene.queues[one, other] = tuple(rest)
        scene.act(other, "hear", one, first)
    elif kind in ("stage", "finish"):
        own = KNOWN[scene.devices[one]]
        if kind == "stage":
            own = own._replace(staged=(own.seat.view.epoch, own.done + 1))
        else:
            own = own._replace(done=own.done + 1)
        scene.devices[one] = place(own)
    elif kind == "crash":
        scene.spend("crashes")
        scene.crashed = scene.crashed | {one}
        scene.queues = {pair: queue for pair, queue in scene.queues.items() if pair[1] != one}
    elif kind == "pause":
        scene.spend("pauses")
        scene.paused = scene.paused | {one}
    elif kind == "hang":
        scene.spend("hangs")
        own = KNOWN[scene.devices[one]]
        seat = own.seat._replace(is_present=False, attends=False)
        scene.devices[one] = place(own._replace(seat=seat))
    elif kind == "resume":
        scene.paused = scene.paused - {one}
    elif kind == "cut":
        scene.spend("cuts")
        scene.sever(one, other)
    elif kind in ("suspect", "mistake"):
        if kind == "mistake":
            scene.spend("mistakes")
        scene.sever(one, other)
        scene.act(one, "suspect", other)
    elif kind == "tick":
        scene.spend("ticks")
        scene.act(one, "wait_no_longer")
    else:
        assert kind == "guest"
        scene.spend("guests")
        for member in KNOWN[scene.devices[other]].seat.view.members:
            if member not in scene.crashed | scene.paused:
                scene.act(member, "invite", one)
        scene.act(other, "alarm")
    return scene.frozen()


# ---- what can happen --------------------------------------------------------------------------


def awake(world: World) -> list[int]:
    gone = world.crashed | world.paused
    return [device for device in range(len(world.devices)) if device not in gone]


def hung(world: World) -> set[int]:
    devices = enumerate(world.devices)
    return {device for device, at in devices if not KNOWN[at].seat.is_present}


def routine(world: World) -> Iterator[Action]:
    """What happens where nothing goes wrong."""
    for (source, target), _ in world.queues:
        if target not in world.paused:
            yield ("deliver", source, target)
    for device in awake(world):
        own = KNOWN[world.devices[device]]
        if not own.works or own.done >= LAST:
            continue
        if own.staged != (own.seat.view.epoch, own.done + 1):
            yield ("stage", device, device)
        elif is_staged(world, device):
            yield ("finish", device, device)


def is_staged(world: World, device: int) -> bool:
    """Whether all members have staged what this device works on."""
    own = KNOWN[world.devices[device]]
    now = (own.seat.view.epoch, own.done + 1)
    if not own.works or own.done >= LAST or own.staged != now:
        return False
    return all(KNOWN[world.devices[d]].staged >= now for d in own.seat.view.members)


def suspicions(world: World) -> Iterator[Action]:
    """Who may rightly be suspected: connections that broke, devices that are silent or hang."""
    gone = world.crashed | world.paused | hung(world)
    for one in awake(world):
        seat = KNOWN[world.devices[one]].seat
        for other in seat.view.members:
            if other == one or other in seat.suspects or seat.is_out:
                continue
            if other in gone or (min(one, other), max(one, other)) in world.cut:
                yield ("suspect", one, other)


def patience(world: World) -> Iterator[Action]:
    if world.budget.ticks:
        for device in awake(world):
            seat = KNOWN[world.devices[device]].seat
            if seat.alarmed and not seat.is_out:
                yield ("tick", device, device)


def misfortunes(world: World) -> Iterator[Action]:
    budget, alive = world.budget, awake(world)
    yield from (("resume", device, device) for device in sorted(world.paused))
    if budget.crashes:
        yield from (("crash", device, device) for device in alive)
    if budget.pauses:
        yield from (("pause", device, device) for device in alive)
    if budget.hangs:
        yield from (("hang", device, device) for device in alive)
    if budget.cuts:
        pairs = combinations(alive, 2)
        yield from (("cut", *pair) for pair in pairs if pair not in world.cut)
    if budget.mistakes:
        for one in alive:
            seat = KNOWN[world.devices[one]].seat
            well = [d for d in seat.view.members if d != one and d not in seat.suspects]
            yield from (("mistake", one, other) for other in well)
    if budget.guests:
        members = [d for d in alive if KNOWN[world.devices[d]].seat.view.members]
        guest = len(world.devices) - budget.guests
        yield from (("guest", guest, member) for member in members)


# ---- what must hold ---------------------------------------------------------------------------


@lru_cache(1 << 16)
def check(places: tuple[int, ...]) -> None:
    """One view for each epoch, one count of what was committed; who was left behind stands."""
    devices = [KNOWN[at] for at in places]
    views: dict[int, View] = {}
    for device in devices:
        view = device.seat.view
        known = views.setdefault(view.epoch, view)
        assert known == view, f"two views of epoch {view.epoch}: {known} and {view}"
    newest = views[max(views)]
    inside = [devices[d] for d in newest.members]
    for device in inside:
        seat = device.seat
        if 0 <= seat.view.epoch < newest.epoch:
            assert not device.works, f"{seat.me} still works in epoch {seat.view.epoch}"
    there = [device for device in inside if device.seat.view == newest]
    told = {d.seat.committed for d in there if d.seat.committed is not None}
    assert len(told) <= 1, f"they disagree on what was committed: {told}"
    counts = [device.done for device in there if device.staged != (-1, 0)]
    assert max(counts, default=0) - min(counts, default=0) <= 1, f"too far apart: {counts}"
    for device in devices:  # who was left behind is ahead by the operation in flight at most
        least = min((member.done for member in there), default=0)
        assert device.done <= least + 1, f"{device.seat.me} finished {device.done}, others {least}"


def check_end(world: World, first: World) -> None:
    """Those who can go on have done so, all of them, and finished the operation.

    That is asked of each view by itself: who is cut off from all that know of a newer one cannot
    go on in it. Who is not was told of it. Where a single thing has happened nobody else is lost
    who is well and reaches all others that are.
    """
    devices = [KNOWN[at] for at in world.devices]
    well = [device for device in awake(world) if device not in hung(world)]
    here = [device for device in well if not devices[device].seat.is_out]
    before = KNOWN[first.devices[0]].seat.view
    enough = tuple(device for device in before.members if device in well)
    is_single = sum(first.budget._replace(ticks=0)) == 1
    if is_single and is_group(enough, before, world):
        for device in enough:
            assert device in here and devices[device].done == LAST, f"{devices[device]} is lost"
    for one, other in combinations(here, 2):
        if (one, other) not in world.cut:
            views = sorted((devices[one].seat.view, devices[other].seat.view))
            knows = {one, other} <= set(views[1].members)
            assert views[0] == views[1] or not knows, f"{one} and {other} are apart: {views}"
    for view in {devices[device].seat.view for device in here}:
        there = [device for device in here if devices[device].seat.view == view]
        if not any(is_group(some, view, world) for some in subsets(there)):
            continue
        for member in view.members:
            assert member in there, f"{member} is gone, but {there} stay in {view}"
            assert devices[member].done == LAST, f"{member} did not finish: {devices[member]}"


def subsets(devices: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(devices, size + 1) for size in range(len(devices)))


def is_group(some: tuple[int, ...], view: View, world: World) -> bool:
    """Whether these may go on in a view, and can all talk to each other."""
    return goes_on(some, view) and not any(pair in world.cut for pair in combinations(some, 2))


def complete(world: World) -> World:
    """Lets everything happen that must, patience last and in turn."""
    world = world._replace(budget=Budget(ticks=60))
    for _ in range(2000):
        actions = [*routine(world), *suspicions(world)]
        if not actions:
            actions = list(patience(world))
            if not actions:
                return world
            actions = [actions[world.budget.ticks % len(actions)]]
        world = happen(world, actions[0])
        check(world.devices)
    raise AssertionError("no end")


# ---- all of them ------------------------------------------------------------------------------


def explore(first: World, *, most: int) -> tuple[int, set[World]]:
    """Walks all worlds from a first one; gives how many there were, and where they end."""
    seen, stack, ends = {first}, [first], set()
    while stack:
        world = stack.pop()
        check(world.devices)
        actions = [*routine(world), *suspicions(world), *patience(world), *misfortunes(world)]
        if not any(kind != "tick" for kind, _, _ in actions):
            end = complete(world)
            check_end(end, first)
            ends.add(end)
        for action in actions:
            following = happen(world, action)
            if following not in seen:
                seen.add(following)
                stack.append(following)
        assert len(seen) <= most, f"more than {most} worlds: give it less to go wrong"
    return len(seen), ends


def wander(first: World, *, draw: random.Random) -> int:
    """One way through the worlds, by chance; gives how many things happened."""
    world, count = first, 0
    while True:
        check(world.devices)
        actions = [*routine(world), *suspicions(world), *misfortunes(world)]
        if not actions:
            check_end(complete(world), first)
            return count
        rare = list(patience(world))
        world = happen(world, draw.choice(rare if rare and draw.random() < 0.1 else actions))
        count += 1

"""Recovery: an operation of all devices survives the loss of some of them.

Whatever devices do together (a forward call, a backward pass, the next batch) is an operation, with
a number. It begins with a note from everybody to everybody, so no device is more than one operation
ahead of another. When members of the run are lost the rest agree on a new view, in which each says
how many operations it has finished:

- all the same: the operation in flight counts as never begun, and all make it again;
- some are one ahead: it is finished. They ``give`` its result to the others, who ``take`` it.
  After a backward pass nothing is given: who sent the last note has all its gradients.

So all survivors see the same results of the same operations.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from terrazzo.errors import Disagreement, PeerLost, PlanError, RunError
from terrazzo.members.control import Control, Interrupted, Stranded
from terrazzo.members.meeting import meet, unwrapped
from terrazzo.members.strangers import Wrap
from terrazzo.members.view import View
from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.links import Links
from terrazzo.runtime.parcel import pack, unpack
from terrazzo.runtime.regroup import regroup
from terrazzo.runtime.sockets import carried_bytes, own_address

Result = TypeVar("Result")
Give = Callable[[int], None]
MOST_TRIES = 4
"""So often the same members make an operation again: what breaks each time is no accident."""
NEW = -1
"""How many operations somebody has finished who has only just joined."""
PROBATION = 4
"""Operations of a step: until a device that has joined has made one, the others lose nothing by
its failure, nor where it does not do the same as they do."""


class Follower(Protocol):
    """Somebody who must know that the members have changed."""

    def follow(self, kept: Sequence[int | None]) -> None:
        """``kept``: for every device its number before, None for one that is new."""


class Host(Protocol):
    """Who has all that a device needs when it joins (a Run)."""

    net: Any

    def give(self, source: int) -> None: ...

    def take(self, source: int) -> None: ...

    def save_last(self, *, alone: bool = False) -> str:
        """There is no going on; gives what was saved and where, in words. ``alone``: each device
        saves for itself, since it cannot talk to the others any more."""


class Tries:
    """How often an operation was begun again among the same members."""

    def __init__(self) -> None:
        self.same = 0
        self._members: tuple[int, ...] = ()

    def again(self, after: tuple[int, ...], error: Interrupted) -> int:
        """Gives how often that did not help; refused where it never will."""
        self.same = self.same + 1 if self._members == after else 1
        self._members = after
        if self.same > MOST_TRIES:
            raise PeerLost(
                f"{len(after)} devices have connected anew {MOST_TRIES} times in one operation and "
                f"it broke again, though none of them was lost ({error}): look at the network "
                "between them and at the memory of each, and start again from the last checkpoint"
            )
        return self.same - 1


class Recovery:
    """The operations of this device, numbered, and what happens when members change."""

    def __init__(self, links: Links, control: Control) -> None:
        self.links, self.control = links, control
        self.host: Host | None = None
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.regrouped = 0
        """How often members have changed."""
        self.took_s = 0.0
        """From the alarm to new links, the last time."""
        self.is_inside = False
        self._fresh: dict[int, int] = {}
        """Members on probation, until the operation of this number."""
        self._give: Give | None = None
        control.wake = links.hang_up
        control.is_waiting = lambda: links.waits
        control.carried_bytes = lambda: carried_bytes(links.sockets)
        control.see_off = self._see_off

    def perform(
        self, attempt: Callable[[], Result], *, take: Callable[[int], Result], give: Any
    ) -> Result:
        """Makes an operation until it is finished for all members.

        ``take(source)`` gets its result from a device that has finished it, and
        ``give(result)(source)`` is the other side of that.
        """
        if self.is_inside:
            return attempt()
        control, links = self.control, self.links
        number = control.done + 1
        control.entered = number
        self.is_inside = True
        is_anew, gives_up, tries = False, False, Tries()
        try:
            act: Callable[[], Result] = attempt
            while True:
                try:
                    control.check(links.epoch)
                    result = act()
                    control.finish(number, links.epoch)
                    break
                except Interrupted as error:
                    source = self._regroup(number, error, tries)
                    act = attempt if source is None else _taking(take, source)
                    is_anew, gives_up = True, False
                except Disagreement as error:
                    self._turn_away(number, error)
                except PlanError as error:
                    if gives_up or not is_anew:
                        raise
                    gives_up, act = True, self._giving_up(error)  # one may be lost in that, too
        except Stranded as error:
            links.fail(error)
            raise PeerLost(f"{error} {self._saved(alone=True)}.") from error
        except PeerLost as error:
            links.fail(error)
            raise
        finally:
            self.is_inside = False
        self._give = give(result)
        return result

    def _turn_away(self, number: int, error: Disagreement) -> None:
        """A device that has just come is gone again, where it is that which differs."""
        fresh = {device for device, until in self._fresh.items() if number <= until}
        fresh &= set(self.links.members)  # the others may have turned it away already
        if not fresh or self.control.done < self.control.until:
            raise error
        self._fresh = {}
        here = set(self.control.view.members)
        self.control.turn_away(fresh & here, f"was turned away: {error}")

    def _see_off(self) -> bool:
        """This script has ended, another device is lost, and the rest may miss the last result."""
        if self.is_inside:
            return False
        self.is_inside = True
        try:
            self._regroup(self.control.done + 1, Interrupted("a device is lost"), Tries())
        except RunError:
            return False
        finally:
            self.is_inside = False
        return True

    def _giving_up(self, error: PlanError) -> Callable[[], NoReturn]:
        """Those who are left have no plan; what they have is saved."""

        def give_up() -> NoReturn:
            count = f"{self.links.devices} devices are"
            count = "1 device is" if self.links.devices == 1 else count
            raise PeerLost(f"{count} left, too few: {error} {self._saved()}.") from error

        return give_up

    def _saved(self, *, alone: bool = False) -> str:
        if self.host is None:
            return "Nothing was saved: tz.Run(..., every=100) saves"
        return self.host.save_last(alone=alone)

    def _regroup(self, number: int, error: Interrupted, tries: Tries) -> int | None:
        """New links; gives who has finished this operation, None if nobody has."""
        begin = time.monotonic()
        before = self.links.members
        self.control.alarm(in_epoch=self.links.epoch)
        while True:
            try:
                view, counts = self.control.next_view(self.links.epoch)
                tried = tries.again(view.members, error)
                regroup(self.links, self.control, view, tried=tried)
                self.took_s = time.monotonic() - begin
                self._tell(before, view, error)
                kept = [before.index(d) if d in before else None for d in view.members]
                for follower in list(self.followers):
                    follower.follow(kept)
                before = view.members
                self.agree_on_weights()
                found = self._settle(number, view, counts)
                self._welcome(view, counts)
                return found
            except Interrupted as again:
                error = again

    def agree_on_weights(self) -> None:
        """Where one device is in the middle of moving weights, nobody has moved any."""
        weights = [follower._weights for follower in self.followers]
        out = any(one.is_out_of_place for one in weights)
        if self.links.gather(torch.tensor([float(out)]), counted=False).any():
            for one in weights:
                one.lose()

    def _settle(self, number: int, view: View, counts: dict[int, int]) -> int | None:
        """Those who are ahead give to those who are behind; newcomers only listen."""
        most = max(counts.values())
        if all(count in (most, NEW) for count in counts.values()):
            return None
        source = next(at for at, device in enumerate(view.members) if counts[device] == most)
        if most >= number:
            return source
        if self._give is not None:
            self._give(source)
        return None

    def _welcome(self, view: View, counts: dict[int, int]) -> None:
        """Newcomers receive what the others have; these are all before the same batch."""
        if NEW in counts.values():
            assert self.host is not None, "who has no run lets nobody in"
            until = probation(counts)
            self._fresh |= {device: until for device, count in counts.items() if count == NEW}
            self.host.give(first_old(view, counts))

    def _tell(self, before: Sequence[int], view: View, error: Interrupted) -> None:
        self.regrouped += 1
        links = self.links
        if self.host is not None:
            tell_where(links)
        if links.recorder is not None:
            links.recorder.note("regroup", devices=float(links.devices), took_s=self.took_s)
        if links.device == 0:
            reasons, called = self.control.reasons, self.control.called
            lost = [
                f"{called(d)} {reasons.get(d, 'was lost')}" for d in before if d not in view.members
            ]
            come = [f"{called(d)} has joined" for d in view.members if d not in before]
            what = "; ".join([*lost, *come]) or f"a connection broke ({error})"
            count = "1 device goes" if links.devices == 1 else f"{links.devices} devices go"
            print(f"terrazzo: {what}: {count} on", file=sys.stderr, flush=True)


def probation(counts: dict[int, int]) -> int:
    """The operation after which who joins now is one like all others."""
    return max(counts.values()) + PROBATION


def first_old(view: View, counts: dict[int, int]) -> int:
    """The first who was here before."""
    return next(place for place, device in enumerate(view.members) if counts[device] != NEW)


def _taking(take: Callable[[int], Result], source: int) -> Callable[[], Result]:
    return lambda: take(source)


def perform(
    links: Links,
    attempt: Callable[[], Result],
    *,
    take: Callable[[int], Result],
    give: Callable[[Result], Give | None],
) -> Result:
    """An operation of all devices; without recovery it is simply made."""
    recovery = links.recovery
    if recovery is None:
        return attempt()
    found: Result = recovery.perform(attempt, take=take, give=give)
    return found


def together(links: Links, attempt: Callable[[], Result]) -> Result:
    """An operation after which all have the result before anybody sees it.

    Nobody has to be given it then: it ends with a round in which each tells that it has it.
    """
    if links.recovery is None or links.recovery.is_inside:
        return attempt()
    had: list[Result] = []

    def whole() -> Result:
        had[:] = [attempt()]
        links.gather(torch.zeros(1), counted=False)
        return had[0]

    return perform(links, whole, take=lambda _: had[0], give=lambda _: None)


# ---- results on their way -----------------------------------------------------------------------


def give_tensors(links: Links, tensors: Sequence[Tensor], source: int, plain: Any = None) -> None:
    """Sends tensors and plain data from ``source``; others who have them too listen along."""
    mine = links.device == source
    rows = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    links.broadcast_bytes(json.dumps([rows, plain]).encode() if mine else None, source)
    for tensor in tensors:
        # Not the tensor itself: it may have been changed since, and must not be.
        links.broadcast(tensor.detach().clone().contiguous(), source)


def take_tensors(links: Links, source: int) -> tuple[list[Tensor], Any]:
    """The other side of ``give_tensors``."""
    rows, plain = json.loads(links.broadcast_bytes(None, source))
    found = []
    for shape, dtype in rows:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        found.append(links.broadcast(tensor, source))
    return found, plain


def give_parcel(links: Links, value: Any, source: int, *, name: str) -> None:
    """Sends nested data with tensors in it; ``name`` says whose, where it cannot be sent."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors, name=name)
    give_tensors(links, tensors, source, packed)


def take_parcel(links: Links, source: int) -> Any:
    """The other side of ``give_parcel``."""
    tensors, packed = take_tensors(links, source)
    return unpack(packed, tensors)


# ---- beginning ----------------------------------------------------------------------------------


def watch(
    links: Links, *, tie: int = 0, credentials: Credentials | None = None, name: str = ""
) -> None:
    """From now on the loss of a device is survived; all devices call this at one time."""
    if links.devices == 1 or links.recovery is not None:
        return
    store = links.store

    def get(key: str) -> str:
        return bytes(store.get(f"terrazzo/members/{key}")).decode()

    links.control = meet(
        links.device,
        links.devices,
        at=own_address(links.sockets),
        put=lambda key, value: store.set(f"terrazzo/members/{key}", value),
        get=get,
        tie=tie,
        limit_s=links.timeout_s,
        wrap=unwrapped if credentials is None else encrypted(credentials),
        name=name,
    )
    links.recovery = Recovery(links, links.control)
    if links.device == 0:
        print(
            f"terrazzo: {links.devices} devices; when some are lost more than half go on, or half "
            f"with {links.control.called(tie)}",
            file=sys.stderr,
            flush=True,
        )


def tell_where(links: Links) -> None:
    """Writes down where the members are, for those who come later; only its owner can read it."""
    control, path = links.control, links.members_file
    if control is None or path is None or links.device != 0:
        return
    here = [control.addresses[member] for member in links.members if member in control.addresses]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch(mode=0o600)
        beside.write_text(
            json.dumps({"addresses": here, "token": control.token}) + "\n", encoding="utf-8"
        )
        beside.replace(path)
    except OSError as error:
        print(f"terrazzo: nobody can join: {path}: {error}", file=sys.stderr, flush=True)


def encrypted(credentials: Credentials) -> Wrap:
    serving, calling = credentials.serving(), credentials.calling()

    def wrap(connection: socket.socket, called: bool) -> socket.socket:
        context = serving if called else calling
        waits = connection.gettimeout() != 0.0
        return context.wrap_socket(connection, server_side=called, do_handshake_on_connect=waits)

    return wrap

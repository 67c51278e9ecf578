"""The other devices: sending boxes, summing, and finding out who is gone.

torch.distributed brings devices together. What they say to each other in a step goes over plain
connections: what somebody waits for by this thread itself, long boxes and sums of weight gradients
by a courier, over connections of their own, so that a few statistics never wait behind megabytes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from terrazzo.errors import PeerLost, RunError
from terrazzo.members.control import INTERRUPTED, Control, Interrupted
from terrazzo.records import Plan
from terrazzo.runtime.courier import Courier, Line
from terrazzo.runtime.group import Group, default_backend
from terrazzo.runtime.inquiry import Inquiry, gist, linger, report_failure
from terrazzo.runtime.letters import Counters, Letters
from terrazzo.runtime.pending import Guard, Pending, Voyage, finish
from terrazzo.runtime.recorder import Recorder
from terrazzo.runtime.sockets import Connection, connections, hang_up, identities, own_address
from terrazzo.runtime.staging import Staging, from_host, room, to_host
from terrazzo.runtime.wire import Parcel, Wire, window_bytes
from terrazzo.schedule.sums import SMALL_BYTES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LEFT_BEHIND, STRANDED = 75, 76
"""Exit statuses of a device that others go on without, and of one that has too few others left."""


class Links(Letters):
    """This device among the others. Alone, every operation is the identity."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.recorder: Recorder | None = None
        self.where = "the start"
        self.waits = False
        """Whether this device waits for others, as they are told every second."""
        self.control: Control | None = None
        """The lines over which members agree on who they are; None: a loss ends the run."""
        self.recovery: Any = None
        """What makes operations anew when members are lost (a Recovery)."""
        self.board: Any = None
        """Where members of a new view have found each other (a Board)."""
        self.later: Any = None
        """Where the others are whom this device joins at its first epoch (a Later)."""
        self.members_file: Path | None = None
        """Where it is written down for those who come later where the members are."""
        self.nets = 0
        """So many nets were made, on all devices in the same order."""
        self.trying: int | None = None
        """The number of the net that tries plans; one at a time does."""
        self.reader = 0
        """Who reads the data where nothing else is said; it breaks ties among the members."""
        self.rehearsal: Any = None
        """How the script is to be fed for a trial, and when it ends (a Rehearsal)."""
        self.given: Plan | None = None
        """The plan that the starter handed over, for the net that leaves it open."""
        self.gears: Any = None
        """What changes this device's power modes (Gears); None: they stay as they are."""
        self.resume_from: Path | None = None
        """Where the checkpoints of an earlier run are, a folder for each device."""
        self.epoch = 0
        self._broken: RunError | None = None
        self.sockets: frozenset[Connection] = frozenset()
        self._baseline: frozenset[Connection] | None = None
        self.hung_up_s: float | None = None
        """Since when the connections there are have been hung up."""
        self._circles: dict[tuple[int, ...], Line] = {}
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        self.device = 0 if self.is_alone else dist.get_rank()
        self.devices = 1 if self.is_alone else dist.get_world_size()
        self.members = tuple(range(self.devices))
        """The numbers that the devices started with, in order of their numbers now."""
        self.timeout_s = 0.0 if self.is_alone else _timeout().total_seconds()
        if not self.is_alone:
            with self._guard():
                self.begin(connections())
                self.connect(dist.distributed_c10d._get_default_store())
            atexit.register(self.close)

    def begin(self, baseline: frozenset[Connection]) -> None:
        """From now on connections are made; those that were there before are not ours."""
        self._baseline, self.hung_up_s = baseline, None

    def connect(self, store: Store, meeting_s: float | None = None) -> None:
        """Groups and wire over a store; ``meeting_s`` bounds the wait for each other."""
        self.store, everybody = store, tuple(range(self.devices))
        before, baseline = connections(), self._baseline or frozenset()
        meeting = None if meeting_s is None else timedelta(seconds=meeting_s)
        self._gloo = Group(everybody, store=self.store, limit=self.limit, meeting=meeting)
        self._circles = {}
        if self.devices > 1:
            try:
                self._address = own_address(connections() - before - self._lines())
                self._wire = self._wired("wire", everybody, meeting_s)
                long, sums = (self._wired(n, everybody, meeting_s) for n in ("long", "sums"))
                self._courier = Courier()
                self._long = Line(self._courier, long)
                self._circles[everybody] = Line(self._courier, sums)
            except OSError as error:
                raise RuntimeError(f"connecting to the other devices failed: {error}") from error
        self.sockets, self._baseline = connections() - baseline, None

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def called(self, place: int) -> str:
        """The device at a place among those who are here, as people know it."""
        number = self.members[place]
        return f"device {number}" if self.control is None else self.control.called(number)

    def _wired(self, name: str, members: Sequence[int], meeting_s: float | None = None) -> Wire:
        return Wire(
            PrefixStore(name, self.store), self.device, members, address=self._address,
            timeout_s=self.timeout_s, meeting_s=meeting_s,
        )  # fmt: skip

    # ---- talking -----------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Posts all (peer, tensor) messages at once, does something else, then waits."""
        voyage = self.depart(sends, receives, busy=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
        voyage.land()

    def depart(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, busy: bool) -> Voyage:
        """Posts all (peer, tensor) messages at once; the voyage it gives is to be landed.

        What two devices send each other both sides name in one order.

        ``busy``: this device does something else until then.
        """
        self._check_whole()
        staging = Staging()
        if self.devices == 1:  # a plan for one device may move boxes from it to itself
            return Voyage(self, staging)
        leaving = [(peer, staging.outgoing(tensor)) for peer, tensor in sends]
        arriving = [(peer, staging.incoming(tensor)) for peer, tensor in receives]
        staging.settle()
        self.counters.sent_bytes += sum(tensor.nbytes for _, tensor in leaving)
        out_long, out_short = self._by_length(leaving, busy=busy)
        in_long, in_short = self._by_length(arriving, busy=busy)
        with self._guard():
            carried = self._long.carry(out_long, in_long) if out_long or in_long else None
            return Voyage(self, staging, self._wire.begin(out_short, in_short), carried)

    def _by_length(
        self, messages: Sequence[Parcel], *, busy: bool
    ) -> tuple[list[Parcel], list[Parcel]]:
        """Messages that would stand still while nobody looks, for the courier; and others."""
        limit = window_bytes(self.devices) if busy else inf
        long = [message for message in messages if message[1].nbytes > limit]
        return long, [message for message in messages if message[1].nbytes <= limit]

    def gather(
        self,
        tensor: Tensor,
        *,
        counted: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """One small tensor of equal shape from each device, stacked in order of device.

        Every device writes to every other at once. A ring would send as little, but in as many
        rounds as there are devices, and a round can wait for each of them to wake up.
        """
        if self.devices == 1:
            return tensor.unsqueeze(0)
        with self._guard():
            work = self._timed(meanwhile)
            parts = self._wire.gather(to_host(tensor), meanwhile=work)
        if counted:
            self.counters.summed_bytes += tensor.nbytes
        return parts.to(tensor.device)

    def combine(
        self,
        tensor: Tensor,
        combined: Callable[[Tensor], Tensor],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """What ``combined`` makes of the small tensors of all devices, stacked: of equal shape, in
        host memory, the same on all. It is to be read at once."""
        if self.devices == 1:
            return combined(tensor.unsqueeze(0))
        with self._guard():
            found = self._wire.combine(tensor, combined, meanwhile=self._timed(meanwhile))
        self.counters.summed_bytes += tensor.nbytes
        return found

    def sum(self, tensor: Tensor, *, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """The sum over devices, in place; small ones in one round, added in order of device.

        It is made on the hosts: a GPU would round otherwise than a CPU beside it.
        """
        if self.devices == 1:
            return tensor
        if tensor.nbytes <= SMALL_BYTES:
            host = to_host(tensor)
            total = self.combine(host, lambda parts: parts.sum(0), meanwhile=meanwhile)
            return from_host(tensor, host.copy_(total))
        under_way = self.sum_later(tensor)
        if meanwhile is not None:
            meanwhile()
        return under_way.wait()

    def sum_later(self, tensor: Tensor, circle: tuple[int, ...] | None = None) -> Pending:
        """Starts a sum in the background, over all devices or some; ``wait`` on what it gives."""
        line = self._circles[circle or tuple(range(self.devices))]
        host = to_host(tensor)
        with self._guard():
            job = line.sum(host)
        self.counters.summed_bytes += tensor.nbytes
        return Pending(self, job, tensor, host)

    def form_circles(self, circles: Iterable[tuple[int, ...]]) -> None:
        """Lets some devices sum among themselves; all devices name all circles, in one order."""
        for devices in circles:
            if devices in self._circles or self.device not in devices or len(devices) < 2:
                continue
            before = connections()
            with self._guard():
                wire = self._wired("-".join(map(str, devices)), devices)
                self._circles[devices] = Line(self._courier, wire)
            self.sockets |= connections() - before

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One device's tensor, in place on all; as bytes, because gloo knows few dtypes."""
        if self.devices > 1 and tensor.numel():
            data = tensor.view(-1).view(torch.uint8)
            host = to_host(data) if self.device == source else room(data)
            with self._guard():
                finish(self, self._gloo.broadcast(host, source))
            from_host(data, host)
        return tensor

    def _timed(self, work: Callable[[], None] | None) -> Callable[[], None] | None:
        return None if work is None else lambda: self._meanwhile(work)

    def _meanwhile(self, work: Callable[[], None] | None) -> None:
        """Does something else, which is work of its own although messages are on their way."""
        if work is not None:
            begin = time.perf_counter()
            self.waits = False
            work()
            self.waits = True
            self.counters.away_s -= time.perf_counter() - begin

    # ---- losing each other -------------------------------------------------------------

    def _guard(self) -> Guard:
        """Turns a broken connection into an error that names the device; counts the time."""
        self._check_whole()
        return Guard(self)

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RunError(f"the devices lost each other earlier: {self._broken}")

    def lost(self, error: RuntimeError, peer: int | None) -> RunError:
        """Wakes the others, then asks them through the store who is gone."""
        self.hang_up()
        if self.recovery is not None:
            self.recovery.control.alarm()
            told = f"{gist(error)}, in {self.where} on device {self.device}"
            if self.recovery.is_inside:
                return Interrupted(told)
            self._broken = PeerLost(f"a device was lost where the others cannot go on: {told}")
            return self._broken
        inquiry = Inquiry(self.store, self.device, self.devices)
        linger(self.store, self.device, inquiry.here)
        text = inquiry.text
        if not text and peer is not None:
            text = f"the connection to device {peer} broke, or it was silent too long"
        elif not text:
            text = f"no answer from the other devices within {self.timeout_s:g} s"
        lost = PeerLost(
            f"{text}, in {self.where} on device {self.device} ({gist(error)}). "
            "Start again without it, or look at its own output."
        )
        self._broken = lost
        self._leave()
        return lost

    def abort(self, reason: str, *, stay: bool = True) -> None:
        """Gives up on the run: tells the others why, and closes the connections so they wake.

        With ``stay`` device 0, where the reason is kept, waits until they have read it.
        """
        if self.is_alone or self._broken is not None:
            return
        self._broken = RunError(reason)
        if self.control is not None:
            self.control.leave(reason)
            self.hang_up()
            return
        report_failure(self.store, self.device, reason)
        self.hang_up()
        if stay:
            linger(self.store, self.device, range(1, self.devices))
        self._leave()

    def become_member(self, control: Control, timeout_s: float) -> None:
        """One who was alone comes to others."""
        self.control, self.timeout_s, self.epoch = control, timeout_s, -1
        atexit.register(self.close)

    def fail(self, error: RunError) -> None:
        """There is no going on: whatever is asked for from now on says why."""
        self._broken = error
        self.hang_up()

    def hang_up(self) -> None:
        """Whatever waits on a connection of this device, at either end, fails at once."""
        begun = connections() - self._baseline if self._baseline is not None else frozenset()
        hang_up((self.sockets | begun) - self._lines())
        self.hung_up_s = self.hung_up_s or time.monotonic()

    def abandon(self) -> None:
        """Something sleeps in gloo, and to take its group down would wait for it."""
        self._gloo.abandon()

    def _lines(self) -> frozenset[Connection]:
        """Connections of the members' own: one may be made while links are."""
        return frozenset() if self.control is None else identities(self.control.sockets())

    def close(self) -> None:
        """Parts from the others; left to the end of the process, gloo's threads may crash it."""
        if self.control is not None:
            error = getattr(sys, "last_value", None)
            self.control.leave(in_words(error))
            if self.control.is_left_behind and error is not None:
                sys.stdout.flush()
                sys.stderr.flush()
                # The starter must not take it for a failure of the run.
                os._exit(STRANDED if self.control.is_stranded else LEFT_BEHIND)
        if self._broken is None:
            self._broken = RunError("this device has left the others")
            self.hang_up()
        self.drop()

    def drop(self) -> None:
        """Lets go of groups and wire."""
        if hasattr(self, "_courier"):
            self._courier.close()
            for line in (self._long, *self._circles.values()):
                line.close()
            del self._courier, self._long
        if hasattr(self, "_wire"):
            self._wire.close()
            del self._wire
        if hasattr(self, "_gloo"):
            del self._gloo
        self._circles = {}

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


_CONNECTED: dict[object, Links] = {}
"""The links over torch.distributed's default group, which is process-wide like they are."""


def connect() -> Links:
    """The links to the other devices: made once per process group."""
    group = _default_group()
    if group not in _CONNECTED:
        _CONNECTED.clear()
        _CONNECTED[group] = Links()
    return _CONNECTED[group]


def _default_group() -> object:
    together = dist.is_available() and dist.is_initialized()
    return dist.distributed_c10d._get_default_group() if together else None


def adopt(links: Links) -> None:
    """These are the links of the process group that there is now."""
    _CONNECTED.clear()
    _CONNECTED[_default_group()] = links


def recorder() -> Recorder | None:
    """The recorder of this device, if there is one; nothing is connected to find out."""
    return next((links.recorder for links in _CONNECTED.values()), None)


def in_words(error: BaseException | None) -> str:
    """What ended the script, for the others; nothing: it has come to its end."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return "" if error is None else INTERRUPTED
    return f"{type(error).__name__}: {error}"


def _timeout() -> timedelta:
    """The timeout that the default process group was made with."""
    limit: timedelta = default_backend().options._timeout
    return limit

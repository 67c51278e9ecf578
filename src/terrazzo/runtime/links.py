"""The other devices: sending boxes, summing, and finding out who is gone.

torch.distributed brings devices together and sums weight gradients, in a group of their own: a few
statistics never wait behind megabytes. What somebody waits for goes over plain connections.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.errors import PeerLost, RunError
from terrazzo.runtime.group import Group, default_backend
from terrazzo.runtime.inquiry import Inquiry, linger, report_failure
from terrazzo.runtime.recorder import Recorder
from terrazzo.runtime.sockets import Connection, connections, hang_up, own_address
from terrazzo.runtime.staging import Staging, from_host, room, to_host
from terrazzo.runtime.wire import End, Parcel, Wire, window_bytes
from terrazzo.schedule.sums import SMALL_BYTES

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LONGEST_GIST = 120

Message = tuple[int, int, Tensor]
"""The other device, a tag that both sides give it, and what is sent or received."""


@dataclass
class Counters:
    """Payload so far: boxes sent to peers, and the sizes of what was summed or gathered."""

    sent_bytes: int = 0
    summed_bytes: int = 0
    away_s: float = 0.0
    """Seconds of this device in messages and in waiting for them; the rest is its own work."""

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.summed_bytes


class Links:
    """This device among the others. Alone, every operation is the identity."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.recorder: Recorder | None = None
        self.where = "the start"
        self._broken: RunError | None = None
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.device = 0 if self._alone else dist.get_rank()
        self.devices = 1 if self._alone else dist.get_world_size()
        if not self._alone:
            self._store: Store = dist.distributed_c10d._get_default_store()
            limit, everybody = _timeout(), tuple(range(self.devices))
            self.timeout_s = limit.total_seconds()
            self._sockets: frozenset[Connection] = frozenset()
            before = connections()
            with self._guard():
                self._small = self._group("small", everybody, limit)
                self._bulk = self._group("bulk", everybody, limit)
            self._circles: dict[tuple[int, ...], Group] = {everybody: self._bulk}
            if self.devices > 1:
                self._wire = self._open_wire(connections() - before)
            self._sockets = connections() - before
            atexit.register(self.close)

    def _open_wire(self, over: Iterable[Connection]) -> Wire:
        """Where gloo's connections end here, others can reach this device."""
        with self._guard():
            try:
                return Wire(
                    self._store, self.device, self.devices,
                    address=own_address(over), timeout_s=self.timeout_s,
                )  # fmt: skip
            except OSError as error:
                raise RuntimeError(f"connecting to the other devices failed: {error}") from error

    def _group(self, name: str, members: Sequence[int], limit: timedelta) -> Group:
        return Group(name, members, store=self._store, limit=limit)

    # ---- talking -----------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Posts all (peer, tag, tensor) messages at once, does something else, then waits."""
        voyage = self.depart(sends, receives, busy=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
        voyage.land()

    def depart(
        self, sends: Sequence[Message], receives: Sequence[Message], *, busy: bool
    ) -> Voyage:
        """Posts all (peer, tag, tensor) messages at once; the voyage it gives is to be landed.

        ``busy``: this device does something else until then.
        """
        self._check_whole()
        staging = Staging()
        if self.devices == 1:  # a plan for one device may move boxes from it to itself
            return Voyage(self, staging)
        leaving = [(peer, tag, staging.outgoing(tensor)) for peer, tag, tensor in sends]
        arriving = [(peer, tag, staging.incoming(tensor)) for peer, tag, tensor in receives]
        staging.settle()
        self.counters.sent_bytes += sum(tensor.nbytes for _, _, tensor in leaving)
        out_long, out_short = self._by_length(leaving, busy=busy)
        in_long, in_short = self._by_length(arriving, busy=busy)
        works = []
        with self._guard():
            for peer, tag, tensor in in_long:
                works.append((peer, self._small.receive(tensor, peer, tag)))
            for peer, tag, tensor in out_long:
                works.append((peer, self._small.send(tensor, peer, tag)))
            return Voyage(self, staging, self._wire.begin(out_short, in_short), works)

    def _by_length(
        self, messages: Sequence[Message], *, busy: bool
    ) -> tuple[list[Message], list[Parcel]]:
        """Messages that would stand still while nobody looks, for gloo's threads; and others."""
        limit = window_bytes(self.devices) if busy else inf
        long = [message for message in messages if message[2].nbytes > limit]
        short = [(peer, tensor) for peer, _, tensor in messages if tensor.nbytes <= limit]
        return long, short

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
            parts = self._wire.gather(to_host(tensor), meanwhile=self._timed(meanwhile))
        if counted:
            self.counters.summed_bytes += tensor.nbytes
        return parts.to(tensor.device)

    def sum(self, tensor: Tensor, *, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """The sum over devices, in place; small ones in one round, added in order of device.

        It is made on the hosts: a GPU would round otherwise than a CPU beside it.
        """
        if self.devices == 1:
            return tensor
        host = to_host(tensor)
        if tensor.nbytes <= SMALL_BYTES:
            return tensor.copy_(self.gather(host, meanwhile=meanwhile).sum(0))
        with self._guard():
            work = self._small.sum(host)
            self._meanwhile(meanwhile)
            work.wait()
        self.counters.summed_bytes += tensor.nbytes
        return from_host(tensor, host)

    def sum_later(self, tensor: Tensor, circle: tuple[int, ...] | None = None) -> Pending:
        """Starts a sum in the background, over all devices or some; ``wait`` on what it gives."""
        group = self._bulk if circle is None else self._circles[circle]
        host = to_host(tensor)
        with self._guard():
            work = group.sum(host)
        self.counters.summed_bytes += tensor.nbytes
        return Pending(self, work, tensor, host)

    def form_circles(self, circles: Iterable[tuple[int, ...]]) -> None:
        """Lets some devices sum among themselves; all devices name all circles, in one order."""
        for devices in circles:
            if devices in self._circles or self.device not in devices or len(devices) < 2:
                continue
            before = connections()
            with self._guard():
                limit = timedelta(seconds=self.timeout_s)
                name = "-".join(map(str, devices))
                self._circles[devices] = self._group(name, devices, limit)
            self._sockets |= connections() - before

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One device's tensor, in place on all; as bytes, because gloo knows few dtypes."""
        if self.devices > 1 and tensor.numel():
            data = tensor.view(-1).view(torch.uint8)
            host = to_host(data) if self.device == source else room(data)
            with self._guard():
                self._small.broadcast(host, source).wait()
            from_host(data, host)
        return tensor

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """A byte string from one device; the others pass None."""
        if self.devices == 1:
            assert data is not None
            return data
        size = self.broadcast(torch.tensor([len(data or b"")]), source)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return bytes(self.broadcast(buffer, source).numpy().tobytes()) if int(size) else b""

    def gather_text(self, text: str) -> list[str]:
        """A short text from each device."""
        data = text.encode()
        sizes = self.gather(torch.tensor([len(data)]), counted=False)
        buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        if data:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(buffer, counted=False)
        return [
            row[: int(size)].numpy().tobytes().decode()
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _timed(self, work: Callable[[], None] | None) -> Callable[[], None] | None:
        return None if work is None else lambda: self._meanwhile(work)

    def _meanwhile(self, work: Callable[[], None] | None) -> None:
        """Does something else, which is work of its own although messages are on their way."""
        if work is not None:
            begin = time.perf_counter()
            work()
            self.counters.away_s -= time.perf_counter() - begin

    # ---- losing each other -------------------------------------------------------------

    def _guard(self, peer: int | None = None) -> _Guard:
        """Turns a broken connection into an error that names the device; counts the time."""
        self._check_whole()
        return _Guard(self, peer)

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RunError(f"the devices lost each other earlier: {self._broken}")

    def _lost(self, error: RuntimeError, peer: int | None) -> RunError:
        """Wakes the others, then asks them through the store who is gone."""
        hang_up(self._sockets)
        inquiry = Inquiry(self._store, self.device, self.devices)
        linger(self._store, self.device, inquiry.here)
        text = inquiry.text
        if not text and peer is not None:
            text = f"the connection to device {peer} broke, or it was silent too long"
        elif not text:
            text = f"no answer from the other devices within {self.timeout_s:g} s"
        lost = PeerLost(
            f"{text}, in {self.where} on device {self.device} ({_gist(error)}). "
            "Start again without it, or look at its own output."
        )
        self._broken = lost
        self._leave()
        return lost

    def abort(self, reason: str, *, stay: bool = True) -> None:
        """Gives up on the run: tells the others why, and closes the connections so they wake.

        With ``stay`` device 0, where the reason is kept, waits until they have read it.
        """
        if self._alone or self._broken is not None:
            return
        self._broken = RunError(reason)
        report_failure(self._store, self.device, reason)
        hang_up(self._sockets)
        if stay:
            linger(self._store, self.device, range(1, self.devices))
        self._leave()

    def close(self) -> None:
        """Parts from the others; left to the end of the process, gloo's threads may crash it."""
        if self._broken is None:
            self._broken = RunError("this device has left the others")
            hang_up(self._sockets)
        if hasattr(self, "_wire"):
            self._wire.close()
        if hasattr(self, "_small"):
            del self._small, self._bulk, self._circles

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _gist(error: RuntimeError) -> str:
    """What an error of torch.distributed says, without the places in its sources."""
    line = (str(error).splitlines() or [""])[0]
    line = re.sub(r"\[?\S+\.(?:cc|cpp|h|hpp):\d+\]?:?\s*", "", line)
    words = re.split(r"\.\s|\s+This may|\s+Original error", line, maxsplit=1)[0].strip(" .")
    return words[:LONGEST_GIST] or type(error).__name__


_CONNECTED: dict[object, Links] = {}
"""The links over torch.distributed's default group, which is process-wide like they are."""


def connect() -> Links:
    """The links to the other devices: made once per process group."""
    together = dist.is_available() and dist.is_initialized()
    group = dist.distributed_c10d._get_default_group() if together else None
    if group not in _CONNECTED:
        _CONNECTED.clear()
        _CONNECTED[group] = Links()
    return _CONNECTED[group]


def recorder() -> Recorder | None:
    """The recorder of this device, if there is one; nothing is connected to find out."""
    return next((links.recorder for links in _CONNECTED.values()), None)


def _timeout() -> timedelta:
    """The timeout that the default process group was made with."""
    limit: timedelta = default_backend().options._timeout
    return limit


class _Guard:
    """While a device is busy with others. A class, because it is entered a hundred times a step."""

    __slots__ = ("_begin_s", "_links", "_peer")

    def __init__(self, links: Links, peer: int | None) -> None:
        self._links, self._peer = links, peer

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._links.counters.away_s += time.perf_counter() - self._begin_s
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise self._links._lost(error, getattr(error, "peer", self._peer)) from error


@dataclass
class Voyage:
    """Boxes on their way."""

    links: Links
    staging: Staging
    ends: Sequence[End] = ()
    works: Sequence[tuple[int, dist.Work]] = ()

    def land(self) -> None:
        """Waits until all that was to arrive is there, and all that was sent has left."""
        if self.ends:
            with self.links._guard():
                self.links._wire.end(self.ends)
        for peer, work in self.works:
            with self.links._guard(peer):
                work.wait()
        self.staging.land()


@dataclass
class Pending:
    """A sum under way."""

    links: Links
    work: dist.Work
    tensor: Tensor
    host: Tensor

    def wait(self) -> Tensor:
        with self.links._guard():
            self.work.wait()
        return from_host(self.tensor, self.host)

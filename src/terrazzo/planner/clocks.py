"""Clocks: one for each device, moved on by computing, by messages, and by waiting for others.

Sums of weight gradients run beside: they occupy links and take processor time from computing.
A box that is sent while such a sum is on the link gets half of it until one of them is through.

A device under a quota gets its processor in turns, and keeps a turn or two for later while it
waits. So waiting is not lost on it: up to ``saved_s`` of what it waited it makes up for when it
computes again. An exchange that takes less than its turns are apart costs it nothing but work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from terrazzo.planner.prices import Prices

Message = tuple[int, int, int]
"""Source, destination, bytes."""


@dataclass
class Account:
    """Seconds of one device by what it spent them on."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    sums_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Way:
    """One device's messages under way: when it had sent them, when it has got its, and bytes."""

    ready: float
    arrived: float
    sent: int
    received: int


@dataclass
class Clocks:
    """All devices of a cluster during one training step."""

    prices: Prices
    now: list[float] = field(init=False)
    accounts: list[Account] = field(init=False)

    def __post_init__(self) -> None:
        count = self.prices.devices
        self.now = [0.0] * count
        self.accounts = [Account() for _ in range(count)]
        self._busy_until = [0.0] * count
        self._debt_s = [0.0] * count
        self._later_s = [0.0] * count
        self._saved_s = [0.0] * count
        self._under_way: list[_Way | None] = [None] * count
        self._spent: dict[int, list[Account]] = {}
        self._group: list[Account] = []
        self.sent = [0] * count

    def enter(self, group: int) -> None:
        """What follows is counted for a group, too."""
        fresh = [Account() for _ in self.now]
        self._group = self._spent.setdefault(group, fresh)

    def spent(self, group: int) -> list[Account]:
        return self._spent.get(group, [Account() for _ in self.now])

    def _book(self, device: int, **seconds: float) -> None:
        for account in (self.accounts[device], self._group[device]):
            for name, amount in seconds.items():
                setattr(account, name, getattr(account, name) + amount)

    # ---- alone ---------------------------------------------------------------------------

    def compute(self, device: int, seconds: float) -> None:
        """Computing, slowed down by what a sum in the background takes of the processor."""
        if seconds <= 0.0:
            return
        stolen = 0.0
        if self._debt_s[device] > 0.0:
            stolen = min(self._debt_s[device], seconds)
            self._debt_s[device] -= stolen
        took_s = self._work(device, seconds + stolen)
        self.now[device] += took_s
        part = took_s / (seconds + stolen)
        self._book(device, compute_s=seconds * part, exchange_s=stolen * part)

    def _work(self, device: int, seconds: float) -> float:
        """How long work of so many seconds takes, with what the device has saved."""
        quick_s = min(self._saved_s[device], seconds)
        self._saved_s[device] -= quick_s
        return seconds - quick_s + quick_s / self.prices.slowness[device]

    def _rest(self, device: int, seconds: float) -> None:
        """A device has waited."""
        saved_s = self._saved_s[device] + max(0.0, seconds)
        self._saved_s[device] = min(self.prices.saved_s[device], saved_s)

    def defer(self, device: int, seconds: float) -> None:
        """Work that can wait until messages are on their way: the gradient of weights."""
        self._later_s[device] += seconds

    def catch_up(self, device: int) -> None:
        """Does what had to wait."""
        seconds, self._later_s[device] = self._later_s[device], 0.0
        self.compute(device, seconds)

    # ---- together ------------------------------------------------------------------------

    def depart(self, messages: Sequence[Message]) -> None:
        """Posts the messages of one exchange; devices go on at once."""
        sent, received = self._amounts(messages)
        counts = [0] * len(self.now)
        for source, destination, _ in messages:
            counts[source] += 1
            counts[destination] += 1
        prices = self.prices
        ready = [
            now + self._work(d, counts[d] * prices.message_s(d) + prices.copy_s(sent[d], d))
            if counts[d]
            else now
            for d, now in enumerate(self.now)
        ]
        arrived = self._arrivals(messages, ready, sent, received)
        self._under_way = [
            _Way(ready[d], arrived[d], sent[d], received[d]) if counts[d] else None
            for d in range(len(self.now))
        ]
        for device, way in enumerate(self._under_way):
            if way is not None:
                self._book(device, exchange_s=way.ready - self.now[device])
                self.now[device] = way.ready

    def arrive(self) -> None:
        """Ends what was begun: each device goes on when it has its messages.

        What had to wait is done before a device looks whether they are there.
        """
        for device, way in enumerate(self._under_way):
            if way is None:
                self.catch_up(device)
            else:
                self._end(device, way)

    def _amounts(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        sent, received = [0] * len(self.now), [0] * len(self.now)
        for source, destination, size in messages:
            sent[source] += size
            received[destination] += size
            self.sent[source] += size
        return sent, received

    def _arrivals(
        self,
        messages: Sequence[Message],
        ready: Sequence[float],
        sent: Sequence[int],
        received: Sequence[int],
    ) -> list[float]:
        """When each device has all that was sent to it."""
        prices, arrived = self.prices, list(ready)
        if prices.shared and messages:
            first = min(ready[source] for source, _, _ in messages)
            through = first + sum(sent) / prices.medium
            for source, destination, size in messages:
                own = max(through, ready[source] + size / prices.medium)
                arrived[destination] = max(arrived[destination], own)
            return arrived
        earliest: dict[int, float] = {}
        for source, destination, _ in messages:
            out = ready[source] + sent[source] / prices.up(source)
            arrived[destination] = max(arrived[destination], out + prices.latency_s(source))
            earliest[destination] = min(earliest.get(destination, ready[source]), ready[source])
        for destination, begin in earliest.items():
            through = begin + received[destination] / prices.down(destination)
            arrived[destination] = max(arrived[destination], through)
        return arrived

    def _end(self, device: int, way: _Way) -> None:
        """One device's share of an exchange; the link may be busy with a sum."""
        prices, now, (sent, received) = self.prices, self.now[device], (way.sent, way.received)
        rate = prices.medium if prices.shared else 0.0
        wire_s = (
            (sent + received) / rate
            if rate
            else max(sent / prices.up(device), received / prices.down(device))
        )
        handled_s = (sent + received) * prices.byte_s(device)
        own_s = max(wire_s, handled_s)
        beside_s = max(0.0, min(wire_s, self._busy_until[device] - way.ready))
        if beside_s:
            self._busy_until[device] += beside_s
        through = max(way.ready + own_s, way.arrived) + beside_s
        late_s = self._caught_up(device)
        since_s = now - way.ready + late_s
        here = max(through, now + late_s + min(since_s, handled_s))
        self._rest(device, here - now - late_s - handled_s)
        unpacked_s = self._work(device, prices.copy_s(received, device))
        done = here + unpacked_s
        spent_s = max(0.0, done - now - late_s)
        busy_s = min(spent_s, max(0.0, own_s + beside_s - since_s) + unpacked_s)
        self._book(device, compute_s=late_s, exchange_s=busy_s, waiting_s=spent_s - busy_s)
        self.now[device] = done

    def _caught_up(self, device: int) -> float:
        """How long what had to wait takes; it is done now."""
        seconds, self._later_s[device] = self._later_s[device], 0.0
        return self._work(device, seconds)

    def meet(self, seconds: float) -> None:
        """Something that all devices do together, and none earlier than the last of them."""
        if len(self.now) == 1:
            return
        begin = max(self.now)
        for device, now in enumerate(self.now):
            late_s = self._caught_up(device)
            done = max(begin + seconds, now + late_s)
            left_s = max(0.0, done - now - late_s)
            self._rest(device, left_s)
            own_s = min(seconds, left_s)
            self._book(device, compute_s=late_s, exchange_s=own_s, waiting_s=left_s - own_s)
            self.now[device] = done

    # ---- in the background ---------------------------------------------------------------

    def background(self, payload_bytes: int, circle: Sequence[int]) -> None:
        """Starts a sum as soon as all its devices are there and their links are free."""
        begin = max(max(self.now[d], self._busy_until[d]) for d in circle)
        end = begin + self.prices.sum_s(payload_bytes, len(circle))
        for device in circle:
            self._busy_until[device] = end
            self._debt_s[device] += self.prices.sum_cpu_s(payload_bytes, device, len(circle))

    def finish(self) -> None:
        """Waits for all sums."""
        for device, now in enumerate(self.now):
            left_s, self._debt_s[device] = self._debt_s[device], 0.0
            done = max(now + self._work(device, left_s), self._busy_until[device])
            self._rest(device, done - now - left_s)
            self._book(device, sums_s=done - now)
            self.now[device] = done

"""Starts one process per device, passes on what they print, and ends them all together.

    starting ──all exit 0──▶ done
        │
        ├─one is lost (survive)──▶ the others go on, and it is started again to join them
        ├─one fails──▶ the others have grace_s to say why they stop ──▶ SIGTERM ──▶ SIGKILL
        └─SIGINT, SIGTERM, SIGHUP──▶ passed on ──▶ SIGKILL; a second one: SIGKILL at once

Whatever way it ends, no process of any device's group is left behind.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from terrazzo.cluster.cause import Cause
from terrazzo.cluster.hosts import Hosts, LocalHosts
from terrazzo.cluster.printer import Printer
from terrazzo.cluster.process import DeviceProcess, Failure, LineStream, Process
from terrazzo.cluster.signals import Signals
from terrazzo.cluster.silence import LONGEST_S, Silence
from terrazzo.cluster.sink import Callback, Sink
from terrazzo.errors import LaunchError, TerrazzoError

RECOVER, MEMBERS, JOIN = "TERRAZZO_RECOVER", "TERRAZZO_MEMBERS", "TERRAZZO_JOIN"
NAME = "TERRAZZO_NAME"
"""Tell a device that the loss of another is survived, where members write down where they are, that
it comes later, and what people call it; the same names as in the api."""
MEETING = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that bring devices together at the start."""
LEFT_BEHIND, STRANDED, CUT_OFF = 75, 76, 255
"""Exit statuses of a device that others go on without, of one that has too few others left (the
same as in the runtime), and of ssh when it has lost the device."""
WATCHED = "when some are lost more than half go on"
"""What the first device says once its peers watch over each other."""
TICK_S = 0.02
STOP_S = 5.0  # between asking a process to end and ending it
DRAIN_S = 2.0  # how long what a device left running may hold its output open
TRACEBACK = re.compile(r"(\[rank\d+\]: *)?(Traceback \(most recent call|Exception ignored in)")


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How each device ended: 0, a positive exit status, or minus the number of a signal."""

    statuses: tuple[int, ...]
    failure: Failure | None
    lost: tuple[int, ...] = ()
    """Devices that the others went on without, to a good end."""

    @property
    def ok(self) -> bool:
        return not any(
            status for device, status in enumerate(self.statuses) if device not in self.lost
        )

    @property
    def exit_status(self) -> int:
        """What a shell would report: the first failure's status, 128 + n for signal n."""
        if self.failure is None and self.ok:
            return 0
        first = self.failure.status if self.failure else next(filter(None, self.statuses), 0)
        return first if first >= 0 else 128 - first


def nobody() -> int | None:
    """No device comes later."""
    return None


def launch(
    command: Sequence[str],
    hosts: Hosts | int,
    *,
    env: Mapping[str, str] | None = None,
    per_device_env: Sequence[Mapping[str, str]] | None = None,
    grace_s: float = 10.0,
    survive: bool = False,
    members: Path | None = None,
    restarts: int = 0,
    newcomer: Callable[[], int | None] = nobody,
    output: Callable[[int, str], None] | None = None,
    sink: Sink | None = None,
) -> LaunchResult:
    """Runs ``command`` once per device and waits until all have ended.

    ``hosts`` says where; a number means that many processes of this machine. With ``survive``
    devices that are lost (ended by a signal, cut off) do not end the others. Where a script lets
    devices join, its first device writes ``members``, a file; then one that was lost is started
    again as soon as it can be, up to ``restarts`` times, and so is a device that ``newcomer``
    names: the next number, once there is one more. It raises where there is something to tell.

    Each process inherits this one's environment, then ``env``, then its entry of
    ``per_device_env``, then torchrun's variables. ``output`` is called with (device, line) for
    each line of stdout and stderr; without it lines are printed under the device's name, or go to
    ``sink``.
    """
    if isinstance(hosts, int):
        hosts = LocalHosts(hosts)
    devices = len(hosts.names)
    extras: Sequence[Mapping[str, str]] = per_device_env or [{}] * devices
    _check(command, devices=devices, extras=extras)
    if output is not None:
        sink = Callback(output)
    elif sink is None:
        sink = Printer(hosts.names)
    base = {**os.environ, **(env or {}), RECOVER: "1" if survive else "0"}
    if members is not None:
        base[MEMBERS] = str(members.resolve())
    with ExitStack() as cleanup:
        signals = cleanup.enter_context(Signals())
        port = cleanup.enter_context(hosts.port())

        def start(device: int, *, later: bool = False) -> Process:
            extra = extras[device] if device < devices else {}
            given = {**base, **extra, NAME: hosts.names[device]}
            environment = hosts.environment(device, port=port, base=given)
            if later:
                environment = {k: v for k, v in environment.items() if k not in MEETING}
                environment[JOIN] = "1"
            process = hosts.run(command, device=device, environment=environment)
            cleanup.callback(process.close)
            return process

        def again(device: int) -> Process | None:
            """One that was lost, once there is a way to join the others."""
            if members is None or not hosts.can_return(device, members):
                return None
            return start(device, later=True)

        def new() -> Process | None:
            device = newcomer() if members is not None else None
            return None if device is None else start(device, later=True)

        watch = _Watch(
            [start(device) for device in range(devices)], sink=sink, signals=signals,
            grace_s=grace_s, survive=survive, again=again, new=new, restarts=restarts,
        )  # fmt: skip
        result = watch.until_done()
    signals.deliver()
    return result


def _check(command: Sequence[str], *, devices: int, extras: Sequence[Mapping[str, str]]) -> None:
    if not command:
        raise LaunchError("nothing to start: the command is empty")
    if shutil.which(command[0]) is None:
        raise LaunchError(f"cannot start {command[0]}: no such program; give its path")
    if len(extras) != devices:
        raise LaunchError(
            f"per_device_env has {len(extras)} entries for {devices} devices; give one for each"
        )


class _Watch:
    """The devices while they run."""

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        sink: Sink,
        signals: Signals,
        grace_s: float,
        survive: bool,
        again: Callable[[int], Process | None],
        new: Callable[[], Process | None],
        restarts: int,
    ) -> None:
        self._processes = list(processes)
        self._survive = survive
        self._again, self._new = again, new
        self._restarts, self._most = [restarts] * len(processes), restarts
        self._returned: set[int] = set()
        self._away: dict[int, Process] = {}
        """Devices that are lost and may come back, by the process that ended."""
        self._lost: list[Process] = []
        self._watched = False
        self._silence, self._given_up = Silence(len(processes)), False
        self._sink = sink
        self._signals = signals
        self._grace_s = grace_s
        self._cause = Cause()
        self._ended_s: dict[int, float] = {}
        self._hushed: set[int] = set()
        self._signals_handled = 0
        self._orders: list[tuple[float, int]] = []  # (when, signal) still to be sent to all
        self._selector = selectors.DefaultSelector()

    def until_done(self) -> LaunchResult:
        with self._selector:
            for process in self._processes:
                self._listen(process)
            while not all(process.drained for process in self._processes) or self._running():
                self._pass_on_lines()
                self._note_ends()
                self._note_signals()
                self._end_silence()
                self._bring_back()
                self._carry_out_orders()
                self._sweep()
        failed = self._cause.process
        statuses = tuple(process.status or 0 for process in self._processes)
        if failed is None and self._lost and all(statuses):  # nobody was left to go on
            failed, self._lost = self._lost[0], []
        return LaunchResult(
            statuses=statuses,
            failure=failed.failure() if failed else None,
            lost=tuple(lost.device for lost in self._lost if statuses[lost.device]),
        )

    def _listen(self, process: Process) -> None:
        for stream in process.streams:
            self._selector.register(stream, selectors.EVENT_READ, (process, stream))

    @property
    def _ends(self) -> bool:
        """Whether nobody is to go on any more."""
        return self._given_up or self._cause.process is not None

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.status is None]

    def _pass_on_lines(self) -> None:
        if not self._selector.get_map():
            time.sleep(TICK_S)
            return
        for key, _ in self._selector.select(TICK_S):
            process, stream = key.data
            lines = stream.read()
            if not stream.open:
                self._selector.unregister(key.fd)
            self._emit(process, stream, lines)

    def _emit(self, process: Process, stream: LineStream, lines: list[str]) -> None:
        is_error = stream is process.stderr
        for line in lines:
            if process.status is None:
                self._silence.hear(line)
            if is_error:
                self._watched = self._watched or WATCHED in line
                process.last_lines.append(line)
                # Stopped by hand, a device's traceback says nothing about the script.
                if self._signals.seen and TRACEBACK.match(line):
                    self._hushed.add(process.device)
                if process.device in self._hushed:
                    continue
            self._sink.line(process.device, line, is_error=is_error)

    def _note_ends(self) -> None:
        ended = [process for process in self._running() if process.poll() is not None]
        now_s = time.monotonic()
        self._ended_s |= {process.device: now_s for process in ended}
        failed = [process for process in ended if process.status]
        if self._survive and not self._signals.seen:
            failed = [process for process in failed if not self._let_go(process)]
        if not failed or self._signals.seen:
            return
        if self._cause.process is None:
            self._orders = [
                (now_s + self._grace_s, signal.SIGTERM),
                (now_s + self._grace_s + STOP_S, signal.SIGKILL),
            ]
        self._cause.hear(failed, told_to_end=len(self._orders) < 2)
        self._blame(others=bool(self._running()))

    def _blame(self, *, others: bool) -> None:
        """Names the device that failed first, once it is known."""
        if self._cause.is_told or not self._cause.is_sure(others=others):
            return
        assert self._cause.process is not None
        self._cause.is_told, failure = True, self._cause.process.failure()
        self._sink.notice(f"{failure.name} failed with {failure.reason}{self._wait_for_others()}")

    def _let_go(self, process: Process) -> bool:
        """Whether a device is one that others can go on without, which they find out themselves."""
        status, is_back = process.status or 0, process.device in self._returned
        known = (LEFT_BEHIND, STRANDED, CUT_OFF)
        failed = not self._watched or (status not in known and status > 0)
        if failed and not is_back:  # what could not join again was lost before
            return False
        if process.device not in (lost.device for lost in self._lost):
            self._lost.append(process)
        others = len(self._running())
        if others and not self._ends:
            what = {
                LEFT_BEHIND: "ended, since the others go on without it",
                STRANDED: "ended, since it has too few others left",
            }.get(status, f"ended with {process.failure().reason}")
            count = "the other one" if others == 1 else f"{others} others"
            self._sink.notice(f"{process.name} {what}; {count} may go on")
            if status == STRANDED:
                self._silence.begin(others)
            self._sink.mark(process.device, lost=True)
            # On this machine nobody is cut off: a script has ended itself with that status.
            by_itself = status == CUT_OFF and isinstance(process, DeviceProcess)
            if self._restarts[process.device] and not by_itself:
                self._away[process.device] = process
        return True

    def _end_silence(self) -> None:
        """Those who may go on without a stranded device, and do not, are ended."""
        if not self._silence.is_too_long or self._ends or self._signals.seen:
            return
        names = ", ".join(process.name for process in self._running())
        what = f"nobody has gone on for {LONGEST_S:g} s: {names} may, but say nothing"
        self._sink.notice(f"{what} (paused?). The run is ended")
        self._given_up, now_s = True, time.monotonic()
        self._orders = [(now_s, signal.SIGTERM), (now_s + STOP_S, signal.SIGKILL)]

    def _bring_back(self) -> None:
        """Those who can are started again, and join the others where their script lets them in."""
        if self._ends or self._signals.seen or not self._running():
            self._away.clear()
            return
        if self._silence.reigns:  # nobody is there whom they could join
            return
        self._let_come()
        for device, process in list(self._away.items()):
            new = self._again(device)
            if new is not None:
                del self._away[device]
                self._replace(process, new)
                self._sink.notice(f"{process.name} is started again, to join them")

    def _let_come(self) -> None:
        """A device that was not there at the start."""
        try:
            new = self._new()
        except TerrazzoError as error:
            self._sink.notice(f"nobody else can join yet: {error}")
            return
        if new is not None:
            self._processes.append(new)
            self._restarts.append(self._most)
            self._returned.add(new.device)  # the others do without it, where it fails
            self._sink.add(new.name)
            self._sink.notice(f"{new.name} is new, and is started to join the others")
            self._listen(new)

    def _replace(self, process: Process, new: Process) -> None:
        device = process.device
        self._restarts[device] -= 1
        self._returned.add(device)
        self._sink.mark(device, lost=False)
        for stream in process.streams:  # its last words
            if stream.open:
                self._selector.unregister(stream)
                self._emit(process, stream, [*stream.read(), *stream.close()])
        self._processes[device] = new
        self._ended_s.pop(device, None)
        self._listen(new)

    def _wait_for_others(self) -> str:
        count = len(self._running())
        if count == 0:
            return ""
        others = "the other device has" if count == 1 else f"the {count} others have"
        return f"; {others} {self._grace_s:g} s to end"

    def _note_signals(self) -> None:
        for number in self._signals.seen[self._signals_handled :]:
            now_s = time.monotonic()
            first = self._signals_handled == 0
            self._orders = [(now_s, number), (now_s + STOP_S, signal.SIGKILL)]
            if first:
                names = ", ".join(process.name for process in self._running())
                cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                self._sink.notice(f"{cause}: stopping {names or 'nobody, all have ended'}")
            else:
                self._orders = [(now_s, signal.SIGKILL)]
            self._signals_handled += 1

    def _carry_out_orders(self) -> None:
        while self._orders and self._orders[0][0] <= time.monotonic():
            _, number = self._orders.pop(0)
            self._blame(others=False)
            for process in self._running():
                process.signal(number)

    def _sweep(self) -> None:
        """Ends what a finished device left running, once it has had time for its last lines."""
        now_s = time.monotonic()
        for process in self._processes:
            age_s = now_s - self._ended_s.get(process.device, now_s)
            if process.drained or age_s < DRAIN_S:
                continue
            process.signal(signal.SIGKILL)
            if age_s < 2 * DRAIN_S:
                continue
            for stream in process.streams:  # held by something that left the group
                if stream.open:
                    self._selector.unregister(stream)
                    self._emit(process, stream, stream.close())

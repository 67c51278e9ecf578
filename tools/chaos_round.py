"""A round of chaos: a case is launched, struck, ended in time, and judged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_case import Case
from chaos_faults import NOW_S, Strike, asked, mark, note
from chaos_forks import ForkHosts, asked_of

WORK, JUDGE = "chaos_job:live", "chaos_judge:judged"
LIMIT_S, LINGER_S, END_S, LOOK_S = 150.0, 15.0, 30.0, 0.005
"""For a round; for devices that come back, after the others have ended; for all to end."""
TIMEOUT_S = 40.0
"""What devices give to ``tz.init``."""
SILENT_S, SILENT_IN_LAB_S = 10.0, 4.0
"""How long a device may be silent at least: processes of this machine may have to wait longer for
a core than those of a lab that is no larger than the machine."""
SLOW_BITS_PER_S, FILLED_S, DISK = 5e5, 2.0, "size=192k"
CORES = 0.75
"""The part of this machine's cores that the devices of all labs have together."""
PRESET = """
[board]
about = "a board for chaos: small enough that its memory is soon full"
gflops = 8.0
threads = 1
memory_mib = 512
wire = { mbit = 94.0, delay_ms = 0.3 }
"""


@dataclass
class Outcome:
    """What came of a round."""

    wrong: str = ""
    took_s: float = 0.0
    struck_s: dict[int, float] = field(default_factory=dict)
    """When each device was struck."""
    joined: list[int] = field(default_factory=list)
    steps: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    """Of each device: after which step, in which epoch of members, when."""
    lines: list[str] = field(default_factory=list)


class Round:
    """One case, in local processes or in a lab."""

    def __init__(
        self,
        case: Case,
        context: Any,
        *,
        in_lab: bool,
        patience: float = 1.0,
        share: float | None = 1.0,
    ) -> None:
        """``patience`` multiplies all deadlines, for a machine that is busy; ``share`` is the part
        of its cores that the devices of a lab have, None: there is no limit."""
        self.case, self._context, self._in_lab = case, context, in_lab
        self._patience, self._share = patience, share
        self._done: list[Strike] = []
        self._undo: list[tuple[float, Strike]] = []
        self._trouble = ""
        self.lines: list[str] = []

    def run(self, right: Path) -> Outcome:
        with tempfile.TemporaryDirectory() as name, self._disks(Path(name)):
            folder, begin_s = Path(name), time.monotonic()
            with self._hosts(folder) as hosts:
                wrong = self._live(folder, hosts)
            took_s = time.monotonic() - begin_s
            told = self.case.to_json()
            wrong = wrong or asked_of(self._context, JUDGE, folder, told, right)
            return self._outcome(folder, wrong, took_s)

    def _outcome(self, folder: Path, wrong: str, took_s: float) -> Outcome:
        marks = {device: mark(folder, device) for device in range(self.case.devices)}
        steps: dict[int, list[tuple[int, int, float]]] = {}
        for path in folder.glob("*.steps"):
            rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
            steps[int(path.stem)] = [(int(s), int(e), float(w)) for s, e, w in rows]
        return Outcome(
            wrong=wrong,
            took_s=took_s,
            struck_s={d: float(m.read_text()) for d, m in marks.items() if m.exists()},
            joined=sorted(int(path.stem) for path in folder.glob("*.joined")),
            steps=steps,
            lines=self.lines,
        )

    # ---- where ----------------------------------------------------------------------------

    @contextmanager
    def _hosts(self, folder: Path) -> Iterator[ForkHosts]:
        from terrazzo.cluster.hosts import LocalHosts
        from terrazzo.errors import LabError

        given = {
            "told": self.case.to_json(), "out": folder, "in_lab": self._in_lab,
            "silent_s": self._patience * (SILENT_IN_LAB_S if self._in_lab else SILENT_S),
            "timeout_s": self._patience * TIMEOUT_S,
        }  # fmt: skip
        if not self._in_lab:
            yield ForkHosts(LocalHosts(self.case.devices), self._context, WORK, given)
            return
        from terrazzo.lab import LabHosts, Topology, load_presets

        presets = folder / "presets.toml"
        presets.write_text(PRESET, encoding="ascii")
        topology = Topology.parse(f"{self.case.devices}xboard", load_presets([presets]))
        with LabHosts.open(topology) as lab:
            try:
                self._throttle(lab)
            except LabError as error:
                self.lines.append(f"chaos: NO QUOTAS ON COMPUTING: {error}")
            yield ForkHosts(lab, self._context, WORK, given)

    def _throttle(self, lab: Any) -> None:
        from terrazzo.cluster.hosts import available_cores

        if self._share is None:
            self.lines.append("chaos: NO QUOTAS ON COMPUTING: --unthrottled")
            return
        cores = CORES * available_cores() * self._share / self.case.devices
        lab.throttle([cores] * self.case.devices)

    @contextmanager
    def _disks(self, folder: Path) -> Iterator[None]:
        """A small disk for each device whose disk is to be full."""
        strikes = [strike for strike in self.case.strikes if strike.kind == "disk"]
        small = [folder / "checkpoints" / str(strike.device) for strike in strikes]
        for path in small:
            path.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", path], check=True)
        try:
            yield
        finally:
            for path in small:
                subprocess.run(["umount", path], check=True)

    # ---- while it runs ----------------------------------------------------------------------

    def _live(self, folder: Path, hosts: ForkHosts) -> str:
        """To the end of all devices, which is in time or is made; gives what was wrong with it."""
        thread = threading.Thread(target=self._launch, args=(hosts, folder), daemon=True)
        thread.start()
        limit_s, linger_s = self._patience * LIMIT_S, self._patience * LINGER_S
        late_s, left_s = time.monotonic() + limit_s, None
        try:
            while thread.is_alive() and time.monotonic() < late_s:
                self._attend(folder, hosts)
                if self._others_ended(hosts):
                    left_s = left_s or time.monotonic()
                    if time.monotonic() - left_s > linger_s or not self._comes_back(hosts):
                        break
                time.sleep(LOOK_S)
        finally:  # also where the tool itself is ended
            is_late, end_s = time.monotonic() >= late_s, time.monotonic() + END_S
            while thread.is_alive() and time.monotonic() < end_s:
                for device in list(hosts.latest):
                    hosts.kill(device)
                thread.join(0.2)
        if thread.is_alive():
            return f"the starter did not end within {END_S:.0f} s of its devices"
        return f"took more than {limit_s:.0f} s" if is_late else self._trouble

    def _launch(self, hosts: ForkHosts, folder: Path) -> None:
        from terrazzo.cluster import launch

        begin_s = time.monotonic()

        def heard(device: int, line: str) -> None:
            self.lines.append(f"{time.monotonic() - begin_s:6.2f} s {device} | {line}")

        restarts = self.case.recipe.restarts
        try:
            launch(
                [sys.executable], hosts, env={"OMP_NUM_THREADS": "1"}, survive=True, output=heard,
                restarts=restarts, members=folder / "members.json" if restarts else None,
            )  # fmt: skip
        except Exception as error:
            self._trouble = f"the starter failed: {type(error).__name__}: {error}"

    def _others_ended(self, hosts: ForkHosts) -> bool:
        if len(hosts.latest) < self.case.devices:
            return False
        others = set(range(self.case.devices)) - self.case.loses
        return all(hosts.latest[device].poll() is not None for device in others)

    def _comes_back(self, hosts: ForkHosts) -> bool:
        """Whether a device that was struck may still end by itself."""
        held = {strike.device for _, strike in self._undo}
        held |= {strike.device for strike in self.case.strikes if strike.kind == "hang"}
        running = {device for device, fork in [*hosts.latest.items()] if fork.poll() is None}
        return bool(running - held)

    def _attend(self, folder: Path, hosts: ForkHosts) -> None:
        """What devices ask for from outside, and its end."""
        for strike in self.case.strikes if self._in_lab else ():
            if strike not in self._done and asked(folder, strike.device).exists():
                self._done.append(strike)
                self._strike(strike, hosts.hosts, folder)
        now_s = time.monotonic()
        for due in [due for due in self._undo if due[0] <= now_s]:
            from terrazzo.lab.faults import restore

            self._undo.remove(due)
            restore(hosts.hosts, due[1].device)

    def _strike(self, strike: Strike, lab: Any, folder: Path) -> None:
        from terrazzo.lab.faults import Fault, carry_out

        begin_s = NOW_S()
        value = {"slow": SLOW_BITS_PER_S, "fill": 0.0}.get(strike.kind)
        carry_out(Fault(strike.kind, strike.device, value), lab)
        note(folder, strike.device, begin_s if strike.kind == "kill" else NOW_S())
        lasts_s = FILLED_S if strike.kind == "fill" else strike.lasts_s
        if lasts_s:
            self._undo.append((time.monotonic() + lasts_s, strike))


def is_root() -> bool:
    return os.geteuid() == 0

"""Chaos: devices are killed, paused, hung, cut off and starved at random; numbers must not change.

    python tools/chaos.py --faults 200 --seed 1          # local processes, struck from inside
    sudo python tools/chaos.py --lab --faults 40         # emulated devices, struck from outside

Every round trains a small CNN in float64 on three to five devices, every second one with weights
that are cut by channels. Those who are left must end with the weights of an undisturbed run,
identical on all of them, within the time limit, and no checkpoint may be damaged or wrong. A round
is drawn from the seed and its number alone, so one that failed can be had again: --only NUMBER.

From inside: kill -9, pause, hang, broken connections, a jump of the clock, a full disk (as root:
on a file system of its own); in the batch, forward, notes, backward, commit, the optimiser's step,
validation, a checkpoint, a copy of cut weights, and in the recovery from another fault. From
outside, in the lab: kill, pause, cable pulled, slow link, killed for memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("chaos_job.py")
sys.path.insert(0, str(SCRIPT.parent))

from chaos_faults import LOST, ONLY_CUT, ONLY_SECOND, PLACES, Strike  # noqa: E402

LIMIT_S = 150.0
INSIDE = {"kill": 8, "pause": 3, "hang": 1, "break": 2, "clock": 1, "disk": 2}
"""How often each happens, of all."""
OUTSIDE = ("kill", "pause", "cut", "slow", "fill")
SLOW_BITS_PER_S, DISK = 2e6, "size=192k"
PRELOAD = ["torch", "terrazzo.api", "torch.utils.data", "torch.export._trace", "torch._dynamo"]


def drawn(seed: int, number: int, *, outside: bool) -> tuple[int, str, list[Strike]]:
    """The devices of a round, their layout, and what happens; enough are always left to go on."""
    draw = random.Random(f"{seed} {number}")
    devices, layout = draw.choice([3, 3, 4, 5]), "channels" if number % 2 else "auto"
    struck = draw.sample(range(devices), 2 if devices == 5 and draw.random() < 0.8 else 1)
    strikes: list[Strike] = []
    for device in struck:
        if outside:
            strikes.append(Strike(draw.choice(OUTSIDE), device, after_s=draw.uniform(0.0, 4.0)))
            continue
        kind = draw.choices(list(INSIDE), list(INSIDE.values()))[0]
        if strikes and draw.random() < 0.4:  # both at once
            place, at = strikes[0].place, strikes[0].at
        else:
            place = draw.choice(_places(kind, cut=layout == "channels", first=not strikes))
            at = draw.randint(*PLACES[place][2:])
        strikes.append(Strike(kind, device, place, at))
    return devices, layout, strikes


def _places(kind: str, *, cut: bool, first: bool) -> list[str]:
    if kind == "disk":
        return ["optimiser", "checkpoint"]
    return [
        place
        for place in PLACES
        if (cut or place not in ONLY_CUT) and not (first and place in ONLY_SECOND)
    ]


# ---- what is right --------------------------------------------------------------------------


def judged(folder: Path, devices: int, strikes: Sequence[Strike], right: dict[int, Any]) -> str:
    """What is wrong with what the devices left behind; nothing, if all is well."""
    import torch
    from safetensors.torch import load_file

    found = {int(p.stem): load_file(p) for p in folder.glob("*.safetensors")}
    lost = {strike.device for strike in strikes if strike.kind in LOST}
    missing = set(range(devices)) - lost - set(found)
    if missing:
        return f"devices {sorted(missing)} did not end well"
    states = list(found.values())
    for device, state in found.items():
        wrong = differs(state, right[max(right)])
        if wrong:
            return f"device {device}: {wrong}"
        for name, tensor in state.items():
            if not torch.equal(tensor, states[0][name]):
                return f"device {device}: {name} has other bits than on the first"
    return _damaged(folder / "checkpoints", right)


def differs(state: dict[str, Any], right: dict[str, Any]) -> str:
    """The first tensor that is another, in words."""
    for name, tensor in right.items():
        gap = float((state[name].double() - tensor.double()).norm())
        limit = 1e-10 * max(float(tensor.double().norm()), 1e-3)
        if not gap <= limit:
            return f"{name} is off by {gap:.2e}, limit {limit:.2e}"
    return ""


def _damaged(folder: Path, right: dict[int, Any]) -> str:
    """Every checkpoint that is there is whole, and what it says it is."""
    from terrazzo.errors import RunError
    from terrazzo.runtime.checkpoint import Shelf

    for own in sorted(folder.glob("*")):
        for step in Shelf(own).steps:
            try:
                wrong = differs(dict(Shelf(own).load(step).model), right[step])
            except RunError as error:
                wrong = str(error)
            if wrong:
                return f"checkpoint {step} of device {own.name}: {wrong}"
    return ""


# ---- rounds ---------------------------------------------------------------------------------


class Round:
    """One run with what happens to it."""

    def __init__(self, seed: int, number: int, *, lab: bool) -> None:
        self.devices, self.layout, self.strikes = drawn(seed, number, outside=lab)
        self.lab, self.number = lab, number
        self.lines: list[str] = []
        self.happened = 0

    def run(self, right: dict[int, Any]) -> tuple[str, float]:
        with tempfile.TemporaryDirectory() as name, self._disks(Path(name)):
            folder, begin = Path(name), time.monotonic()
            self._in_lab(folder) if self.lab else self._here(folder)
            took_s = time.monotonic() - begin
            struck = len(list(folder.glob("*.struck")))
            self.happened = len(self.strikes) if self.lab else struck
            wrong = judged(folder, self.devices, self._real(folder), right)
        if took_s > LIMIT_S:
            wrong = wrong or f"took {took_s:.0f} s, more than {LIMIT_S:.0f} s"
        return wrong, took_s

    def _real(self, folder: Path) -> list[Strike]:
        """Those that came to pass: a place may not have been reached so often."""
        if self.lab:
            return self.strikes
        return [one for one in self.strikes if (folder / f"{one.device}.struck").exists()]

    @contextmanager
    def _disks(self, folder: Path) -> Iterator[None]:
        """A small disk for each device whose disk is to be full."""
        small = [folder / "checkpoints" / str(s.device) for s in self.strikes if s.kind == "disk"]
        for path in small:
            path.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", path], check=True)
        try:
            yield
        finally:
            for path in small:
                subprocess.run(["umount", path], check=True)

    def _here(self, folder: Path) -> None:
        """Processes that were forked after torch was loaded: many rounds take little time."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        told = json.dumps([asdict(strike) for strike in self.strikes])
        from chaos_job import forked

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for device in range(self.devices):
            environment = {
                "RANK": str(device), "WORLD_SIZE": str(self.devices), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "TERRAZZO_RECOVER": "1",
            }  # fmt: skip
            given = (environment, folder, told, self.layout)
            processes.append(context.Process(target=forked, args=given))
            processes[-1].start()
        end_s = time.monotonic() + LIMIT_S
        lost = {strike.device for strike in self.strikes if strike.kind in LOST}
        for device, process in enumerate(processes):
            if device not in lost:
                process.join(max(0.0, end_s - time.monotonic()))
        for device, process in enumerate(processes):
            if device in lost and not (folder / f"{device}.struck").exists():
                process.join(max(0.0, end_s - time.monotonic()))
            process.kill()
            process.join()
            log = folder / f"{device}.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            self.lines += [f"{device} | {line}" for line in lines]

    def _launch(self, hosts: Any, folder: Path) -> None:
        from terrazzo.cluster import launch

        launch(
            [sys.executable, str(SCRIPT), str(folder)],
            hosts,
            env={"CHAOS": "[]", "CHAOS_LAYOUT": self.layout, "OMP_NUM_THREADS": "1"},
            survive=True,
            output=lambda device, line: self.lines.append(f"{device} | {line}"),
        )

    def _in_lab(self, folder: Path) -> None:
        from terrazzo.lab import LabHosts, Topology, load_presets

        with LabHosts.open(Topology.parse(f"{self.devices}xpi5", load_presets())) as hosts:
            thread = threading.Thread(target=self._launch, args=(hosts, folder))
            thread.start()
            marks = [folder / f"{device}.begun" for device in range(self.devices)]
            while thread.is_alive() and not all(mark.exists() for mark in marks):
                time.sleep(0.05)
            for strike in sorted(self.strikes, key=lambda one: one.after_s):
                self._strike(hosts, strike)
            thread.join(LIMIT_S)
            for strike in self.strikes:
                hosts.kill(strike.device)
            thread.join(30)

    def _strike(self, hosts: Any, strike: Strike) -> None:
        from terrazzo.lab.faults import Fault, carry_out

        time.sleep(strike.after_s)
        values = {"slow": SLOW_BITS_PER_S, "fill": 0.0}
        carry_out(Fault(strike.kind, strike.device, values.get(strike.kind)), hosts)
        if strike.kind == "pause":
            later = Fault("resume", strike.device)
            threading.Timer(25.0, carry_out, (later, hosts)).start()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="until so many came to pass")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, help="the one round of that number")
    parser.add_argument("--lab", action="store_true", help="emulated devices; needs root")
    options = parser.parse_args(arguments)
    from chaos_job import undisturbed

    if os.geteuid() != 0 and not options.lab:
        INSIDE["disk"] = 0
        print("chaos: NO DISK IS FILLED: that needs root, for a file system of its own")
    right = undisturbed()
    print(f"chaos: seed {options.seed}", flush=True)
    failed, faults, cut, rounds, longest_s = [], 0, 0, 0, 0.0
    for number in count() if options.only is None else [options.only]:
        one = Round(options.seed, number, lab=options.lab)
        wrong, took_s = one.run(right)
        faults, rounds, longest_s = faults + one.happened, rounds + 1, max(longest_s, took_s)
        cut += one.happened if one.layout == "channels" else 0
        told = ", ".join(
            f"{s.kind} {s.device} {s.place} {s.at or f'{s.after_s:.1f} s'}" for s in one.strikes
        )
        print(
            f"{number}: {one.devices} devices, {one.layout}, {told}, {one.happened} came to pass: "
            f"{wrong or 'well'} ({took_s:.1f} s)",
            flush=True,
        )
        if wrong:
            failed.append(number)
            print("\n".join(one.lines[-60:]), flush=True)
        if faults >= options.faults:
            break
    print(
        f"chaos: {faults} faults, {cut} of them on cut weights, in {rounds} rounds, the longest "
        f"{longest_s:.0f} s; {len(failed)} rounds failed {failed or ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

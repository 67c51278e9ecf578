"""Chaos: devices are killed, paused, cut off and hung at random; the numbers must not change.

    python tools/chaos.py --rounds 200 --seed 1          # local processes, struck from inside
    sudo python tools/chaos.py --lab --rounds 50         # emulated devices, struck from outside

Every round trains a small CNN in float64 on three to five devices. Those who are left must end with
the weights of an undisturbed run, identical on all of them, within the time limit. A round is drawn
from the seed and its number alone, so one that failed can be had again: --only NUMBER.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("chaos_job.py")
LIMIT_S = 150.0
PLACES = {
    "batch": ("broadcast_bytes", 8, 40),
    "forward": ("depart", 1, 60),
    "notes": ("gather", 8, 120),
    "backward": ("sum_later", 1, 14),
    "commit": ("finish", 2, 34),
    "optimiser": ("step", 1, 10),
    "recovery": ("next_view", 1, 1),
}
"""The method that is struck, and how often it may have been used before."""
OUTSIDE = ("kill", "pause", "cut", "slow")


@dataclass(frozen=True)
class Strike:
    """What happens to which device: inside, at the n-th use of a method, or after some seconds."""

    kind: str
    device: int
    place: str = ""
    at: int = 0
    after_s: float = 0.0


def drawn(seed: int, number: int, *, outside: bool) -> tuple[int, list[Strike]]:
    """The devices of a round, and what happens to them; enough are always left to go on."""
    draw = random.Random(f"{seed} {number}")
    devices = draw.choice([3, 3, 4, 5])
    struck = draw.sample(range(devices), 2 if devices == 5 and draw.random() < 0.7 else 1)
    strikes = []
    for device in struck:
        if outside:
            kind = draw.choice(OUTSIDE)
            strikes.append(Strike(kind, device, after_s=draw.uniform(0.0, 4.0)))
            continue
        first = not strikes
        place = draw.choice([p for p in PLACES if p != "recovery" or not first])
        kind = draw.choices(["kill", "pause", "hang"], [8, 3, 1])[0]
        strikes.append(Strike(kind, device, place, draw.randint(*PLACES[place][1:])))
    return devices, strikes


def judged(folder: Path, devices: int, strikes: Sequence[Strike], right: dict[str, Any]) -> str:
    """What is wrong with what the devices left behind; nothing, if all is well."""
    import torch
    from safetensors.torch import load_file

    found = {int(p.stem): load_file(p) for p in folder.glob("*.safetensors")}
    lost = {strike.device for strike in strikes if strike.kind != "slow"}
    missing = set(range(devices)) - lost - set(found)
    if missing:
        return f"devices {sorted(missing)} did not end well"
    states = list(found.values())
    for device, state in found.items():
        for name, tensor in right.items():
            gap = float((state[name].double() - tensor.double()).norm())
            limit = 1e-10 * max(float(tensor.double().norm()), 1e-3)
            if not gap <= limit:
                return f"device {device}: {name} is off by {gap:.2e}, limit {limit:.2e}"
            if not torch.equal(state[name], states[0][name]):
                return f"device {device}: {name} has other bits than on the first"
    return ""


class Round:
    """One run with what happens to it."""

    def __init__(self, seed: int, number: int, *, lab: bool) -> None:
        self.devices, self.strikes = drawn(seed, number, outside=lab)
        self.lab, self.number = lab, number
        self.lines: list[str] = []

    def run(self, right: dict[str, Any]) -> tuple[str, float]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            begin = time.monotonic()
            self._in_lab(folder) if self.lab else self._here(folder)
            took_s = time.monotonic() - begin
            wrong = judged(folder, self.devices, self.strikes, right)
        if took_s > LIMIT_S:
            wrong = wrong or f"took {took_s:.0f} s, more than {LIMIT_S:.0f} s"
        return wrong, took_s

    def _launch(self, hosts: Any, folder: Path, strikes: Sequence[Strike]) -> None:
        from terrazzo.cluster import launch

        told = json.dumps([asdict(strike) for strike in strikes])
        launch(
            [sys.executable, str(SCRIPT), str(folder)],
            hosts,
            env={"CHAOS": told, "OMP_NUM_THREADS": "1"},
            survive=True,
            output=lambda device, line: self.lines.append(f"{device} | {line}"),
        )

    def _here(self, folder: Path) -> None:
        self._launch(self.devices, folder, self.strikes)

    def _in_lab(self, folder: Path) -> None:
        from terrazzo.lab import LabHosts, Topology, load_presets

        with LabHosts.open(Topology.parse(f"{self.devices}xpi5", load_presets())) as hosts:
            thread = threading.Thread(target=self._launch, args=(hosts, folder, ()))
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
        carry_out(Fault(strike.kind, strike.device, 2e6 if strike.kind == "slow" else None), hosts)
        if strike.kind == "pause":
            later = Fault("resume", strike.device)
            threading.Timer(25.0, carry_out, (later, hosts)).start()


# ---- inside a device --------------------------------------------------------------------------


def strike_from_inside(strikes: Sequence[Strike], links: Any, optimizer: Any) -> None:
    """Lets what is meant for this device happen at its place."""
    from strike import strike

    for one in strikes:
        if one.device != links.device:
            continue
        method = PLACES[one.place][0]
        target = {"finish": links.control, "next_view": links.control, "step": optimizer}
        act = partial(_do, one.kind)
        strike(target.get(method, links), method, act, at=one.at)


def _do(kind: str) -> None:
    me = os.getpid()
    if kind == "hang":
        time.sleep(3600)
    if kind == "pause":
        if os.fork() == 0:  # somebody must wake it up
            time.sleep(25)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
    else:
        os.kill(me, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, help="the one round of that number")
    parser.add_argument("--lab", action="store_true", help="emulated devices; needs root")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(SCRIPT.parent))
    from chaos_job import undisturbed

    right = undisturbed()
    numbers = range(options.rounds) if options.only is None else [options.only]
    print(f"chaos: seed {options.seed}, {len(numbers)} rounds", flush=True)
    failed, strikes = [], 0
    for number in numbers:
        one = Round(options.seed, number, lab=options.lab)
        wrong, took_s = one.run(right)
        strikes += len(one.strikes)
        told = ", ".join(
            f"{s.kind} {s.device} {s.place} {s.at or f'{s.after_s:.1f} s'}" for s in one.strikes
        )
        print(
            f"{number}: {one.devices} devices, {told}: {wrong or 'well'} ({took_s:.1f} s)",
            flush=True,
        )
        if wrong:
            failed.append(number)
            print("\n".join(one.lines[-40:]), flush=True)
    print(f"chaos: {strikes} faults, {len(failed)} rounds failed {failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

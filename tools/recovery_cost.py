"""What recovery costs when nothing fails: turns with and without it, in one run.

    terrazzo run --on 2 --no-record tools/recovery_cost.py --model resnet18 --input 4x3x160x160
    ... --layout channels     # with copies of cut weights

Kinds of turns follow each other in changing order, so that whatever else the machine does meets all
of them; each is compared with the turn without recovery of the same round. What is told is
processor time of all devices, threads that listen and write checkpoints among them, which other
work on the machine changes little; and time on the clock, which it does. Medians, and in brackets
where the true ones lie with 95 %. A difference of turns is small beside what they use, so what is
used by recovery's own code is counted, too: around operations, and for what calls and batches keep.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import terrazzo as tz
from terrazzo.feed import draws
from terrazzo.runtime.kept import Kept
from terrazzo.runtime.recovery import Recovery
from terrazzo.zoo import NAMES, build

WARM_UP = 2
"""Rounds that do not count."""
EVERY = 100
"""Steps from checkpoint to checkpoint, as in the documents."""


@dataclass(frozen=True)
class Turn:
    """A few steps: seconds on the clock, of all processors, of threads that listen among them, and
    of code that is there for recovery alone."""

    clock_s: float
    processors_s: float
    ears_s: float
    counted_s: float
    copies: int


class Counter:
    """Processor time of functions, in the thread that calls them."""

    def __init__(self) -> None:
        self.used_s = 0.0

    def around(self, owner: Any, name: str) -> None:
        usual = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return usual(*args, **kwargs)
            finally:
                self.used_s += time.thread_time() - begin_s

        setattr(owner, name, counted)

    def around_operations(self) -> None:
        """All of it but the operation itself."""
        usual = Recovery.perform

        def counted(recovery: Recovery, attempt: Any, *, take: Any, give: Any) -> Any:
            inside_s = [0.0]

            def timed() -> Any:
                begin_s = time.thread_time()
                try:
                    return attempt()
                finally:
                    inside_s[0] += time.thread_time() - begin_s

            begin_s, nested = time.thread_time(), recovery.is_inside
            found = usual(recovery, timed, take=take, give=give)
            if not nested:
                self.used_s += time.thread_time() - begin_s - inside_s[0]
            return found

        Recovery.perform = counted  # type: ignore[method-assign]


class Trial:
    """One net, trained for a turn at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.manual_seed(0)
        shape = [int(side) for side in options.input.split("x")]
        x, y = torch.randn(shape), torch.arange(shape[0])
        self.net = tz.parallelize(build(options.model), (x,), layout=options.layout)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.001, momentum=0.9)
        links = self.net.links
        self.run = tz.Run(
            self.net, self.optimizer, loader=[(x, y)] * options.steps, every=10**9,
            checkpoints=folder / str(links.device),
        )  # fmt: skip
        self._on = (links.recovery, links.control)
        self.spares = self.run.spares
        self._counter = Counter()
        self._counter.around_operations()
        self._counter.around(Kept, "__init__")
        self._counter.around(draws, "states")
        self._counter.around(draws, "moved")
        ears = [one for one in threading.enumerate() if one.name == "terrazzo members"]
        self._ears = [time.pthread_getcpuclockid(one.ident) for one in ears if one.ident]

    def turn(self, *, recovery: bool, copies: bool, saves: bool) -> Turn:
        links = self.net.links
        links.recovery, links.control = self._on if recovery else (None, None)
        self.run.spares = self.net._weights.spares = self.spares if copies else None
        links.gather(torch.zeros(1))
        before = self._used()
        for x, y in self.run.feed():
            loss = F.cross_entropy(self.net(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if saves:
            self.run.save()
        clock_s = time.perf_counter() - before[0]
        if saves and self.run.scribe is not None:
            self.run.scribe.finish()  # in its processor time, and not in the loop's
        after = self._used()
        own = [b - a for a, b in zip(before[1:], after[1:], strict=True)]
        told = links.gather(torch.tensor(own[:3], dtype=torch.float64)).sum(0).tolist()
        return Turn(clock_s, *told, copies=int(own[3]))

    def _used(self) -> tuple[float, float, float, float, float]:
        ears_s = sum(time.clock_gettime(clock) for clock in self._ears)
        made = self.spares.made if self.spares is not None else 0
        counted_s = self._counter.used_s
        return time.perf_counter(), time.process_time(), ears_s, counted_s, made


class Costs:
    """What more is used a step, by kind of turn."""

    def __init__(self, rounds: Sequence[dict[str, Turn]], steps: int, k: int) -> None:
        self.rounds, self.steps, self.k = rounds, steps, k
        self.step_s = statistics.median(one["without"].processors_s for one in rounds) / steps
        self.clock_s = statistics.median(one["without"].clock_s for one in rounds) / steps

    def more(self, kind: str, than: str, of: str = "processors_s", per: str = "") -> list[float]:
        """Seconds of each round; a step, or for each copy or checkpoint."""
        found = []
        for one in self.rounds:
            count = {"": self.steps, "copy": one[kind].copies, "checkpoint": 1}[per]
            found.append((getattr(one[kind], of) - getattr(one[than], of)) / count)
        return found

    def told(self) -> dict[str, Any]:
        """Of each part: seconds, and the share of a step that they are."""
        rows: dict[str, Any] = {}
        with_it = self.more("with", "without")
        rows["recovery, a step"] = self._row(with_it, self.step_s)
        on_clock = self.more("with", "without", "clock_s")
        rows["recovery, a step, on the clock"] = self._row(on_clock, self.clock_s)
        counted = [one["with"].counted_s / self.steps for one in self.rounds]
        rows["recovery's own code, a step"] = self._row(counted, self.step_s)
        ears = [one["with"].ears_s / self.steps for one in self.rounds]
        rows["threads that listen, a step"] = self._row(ears, self.step_s)
        saving = self.more("saving", "with", per="checkpoint")
        rows[f"a checkpoint every {EVERY} steps"] = self._row(saving, EVERY * self.step_s)
        if "copying" in self.rounds[0]:
            copying = self.more("copying", "with", per="copy")
            rows[f"a copy every {self.k} steps"] = self._row(copying, self.k * self.step_s)
        return rows

    def _row(self, values: Sequence[float], whole_s: float) -> dict[str, float]:
        low, high = around_median(values)
        middle = statistics.median(values)
        return {
            "s": middle, "share": middle / whole_s, "low": low / whole_s, "high": high / whole_s,
        }  # fmt: skip


def around_median(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95 %: by ranks, whatever values are distributed like."""
    found, count = sorted(values), len(values)
    away = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return found[away], found[count - 1 - away]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", choices=NAMES)
    parser.add_argument("--input", default="4x3x160x160")
    parser.add_argument("--layout", default="tiles")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=30, help="each has one turn of each kind")
    parser.add_argument("--save", type=Path, help="the numbers as JSON")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    tz.init()
    kinds = {"without": (False, False, False), "with": (True, False, False)}
    kinds["saving"] = (True, False, True)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(options, Path(folder))
        if trial.net.homes:
            kinds["copying"] = (True, True, False)
        order, found = random.Random(0), []  # the same on all devices
        for _ in range(options.rounds + WARM_UP):
            one = {}
            for name in order.sample(list(kinds), len(kinds)):
                recovery, copies, saves = kinds[name]
                one[name] = trial.turn(recovery=recovery, copies=copies, saves=saves)
            found.append(one)
    if trial.net.links.device != 0:
        return
    k = trial.spares.interval if trial.spares is not None else 0
    costs = Costs(found[WARM_UP:], options.steps, k)
    print(
        f"{options.model} {options.input} {options.layout} on {trial.net.links.devices} devices: "
        f"a step {costs.step_s:.3f} s of all processors, {costs.clock_s:.3f} s on the clock; "
        f"{options.rounds} rounds of turns of {options.steps} steps, load {os.getloadavg()[0]:.0f}"
    )
    rows = costs.told()
    for name, row in rows.items():
        print(
            f"{name}: {row['s'] * 1e3:.2f} ms, {row['share']:.2%} of a step "
            f"({row['low']:.2%} to {row['high']:.2%})"
        )
    if options.save:
        options.save.write_text(json.dumps({"step_s": costs.step_s, "rows": rows}))


if __name__ == "__main__":
    main()

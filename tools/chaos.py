"""Chaos: devices are killed, paused, hung, cut off and starved at random; numbers must not change.

    python tools/chaos.py --faults 200 --seed 1          # local processes
    sudo python tools/chaos.py --lab --faults 200        # emulated devices, struck from outside too
    ... --lab --unthrottled --faults 200 --at-once 20 --within 245    # labs share 16 cores

Every round trains a small CNN in float64 on three to five devices, every second one with weights
that are cut by channels. Recipes differ: gradients clipped or added up, weights averaged, another
device than the first reads, plans change in the middle, lost devices are started again and join.
Those who are left must end with the weights of an undisturbed run, identical on all of them, within
the time limit; and every checkpoint that is kept must be whole and hold the weights, optimiser,
schedule, averages, random numbers and place in the data of an undisturbed run at its step. A round
is drawn from the seed and its number alone, so one that failed can be had again: --only NUMBER.

What happens: kill -9, a pause, a hang, broken connections, a full disk (as root: a file system of
its own), a jump of the time of day by minutes, hours or days, forth or back (of one process, by a
library that stands before the C library's clocks); in the lab also a pulled cable, a slow link, and
a kill for memory, and there every device has a steady clock of its own.
Where: in the start, a batch, forward, notes, backward, commit, the optimiser's step, validation, a
checkpoint, a copy of cut weights, a change of plans, and in the recovery from another fault, the
return to a copy, and the welcome of a device that joins.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos_case import IN_LAB, INSIDE, Case, drawn
from chaos_crew import Crew, Setting
from chaos_forks import COMPILER, jumping
from chaos_numbers import Tally
from chaos_round import Outcome, is_root

PASSED = 0.8
"""About the part of all strikes that come to pass: others lie in wait where nothing comes by."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="until so many came to pass")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--begin", type=int, default=0, help="the number of the first round")
    parser.add_argument("--only", type=int, help="the one round of that number")
    parser.add_argument("--lab", action="store_true", help="emulated devices; needs root")
    parser.add_argument("--at-once", type=int, default=1, help="rounds that share this machine")
    parser.add_argument(
        "--unthrottled", action="store_true", help="a lab's devices compute as fast as they can"
    )
    parser.add_argument("--devices", type=int, help="in every round; default: 3 to 5")
    parser.add_argument("--kinds", help="only these: kill,pause")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiplies all deadlines: the machine is busy"
    )
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS",
        help="what runs then is ended, and does not count; the rest is summed up",
    )  # fmt: skip
    parser.add_argument("--save", type=Path, help="all numbers as JSON, after every round")
    return parser.parse_args(arguments)


def kinds_of(options: argparse.Namespace) -> Mapping[str, int]:
    kinds = dict(IN_LAB if options.lab else INSIDE)
    if options.kinds:
        kinds = {kind: kinds[kind] for kind in options.kinds.split(",")}
    if not options.lab:
        print("chaos: NO CABLE, LINK OR MEMORY IS TOUCHED: that needs --lab, and root")
    if not is_root() and kinds.pop("disk", None):
        print("chaos: NO DISK IS FILLED: that needs root, for a file system of its own")
    if shutil.which(COMPILER) is None and kinds.pop("clock", None):
        print(f"chaos: NO CLOCK JUMPS: that needs a C compiler, {COMPILER}")
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    begin_s, options = time.monotonic(), parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # labs and disks go first
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork of who has seen a GPU cannot use torch
    tally, wanted = Tally(options.seed), options.faults if options.only is None else math.inf
    print(f"chaos: seed {options.seed}", flush=True)
    if options.lab and (wrong := lab_fault()):
        print(f"chaos: no lab can be made here: {wrong}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = jumping(Path(folder))
            setting = Setting(
                right=Path(folder), in_lab=options.lab, patience=options.patience,
                at_once=options.at_once, library=library, throttled=not options.unthrottled,
            )  # fmt: skip
            with Crew.of(setting) as crew:
                end_s, drawn = begin_s + options.within, cases(options)
                for number, case, found in played(drawn, crew, wanted=wanted, end_s=end_s):
                    tally.add(number, case, found)
                    in_full = options.only is not None or tally.was_slow(number)
                    tell(number, case, found, in_full=in_full)
                    if options.save:
                        told = json.dumps({**tally.told(), "each": tally.rows})
                        options.save.write_text(told, encoding="utf-8")
    finally:  # also where it is ended before its time
        print("\n".join(tally.lines()), json.dumps(tally.told()), sep="\n", flush=True)
    return 1 if tally.failed or (tally.faults != wanted and options.only is None) else 0


def lab_fault() -> str:
    """Why there is no lab here; nothing, if there can be one."""
    from terrazzo.errors import LabError
    from terrazzo.lab import LabHosts, Topology, load_presets

    try:
        with LabHosts.open(Topology.parse("2xpi3", load_presets([]))):
            return ""
    except (LabError, OSError) as error:
        return str(error)


def cases(options: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    """Twice as many as could be needed, if all faults came to pass.

    Of those that are needed if most do, the long ones come first: rounds side by side then end at
    about the same time. The others come by number.
    """
    kinds, devices = kinds_of(options), (options.devices,) if options.devices else (3, 4, 4, 5)
    numbers: Iterable[int] = range(options.begin, options.begin + 2 * options.faults + 10)
    numbers = numbers if options.only is None else [options.only]
    later = ((n, drawn(options.seed, n, kinds=kinds, devices=devices)) for n in numbers)
    first: list[tuple[int, Case]] = []
    for one in later:
        first.append(one)
        if PASSED * sum(len(case.strikes) for _, case in first) >= options.faults:
            break
    if options.at_once > 1:
        first.sort(key=lambda one: -one[1].expected_s)
    yield from first
    yield from later


def played(
    cases: Iterator[tuple[int, Case]], crew: Crew, *, wanted: float, end_s: float = math.inf
) -> Iterator[tuple[int, Case, Outcome]]:
    """Rounds as they end, until exactly as many faults as are wanted have come to pass.

    A round with more strikes than are still wanted is left out, with its number. So is one that
    is not expected to end by ``end_s``, and one that has not ended then.
    """
    running: dict[int, Case] = {}
    while True:
        while crew.has_room:
            room = wanted - sum(len(case.strikes) for case in running.values())
            number, case = next(cases, (0, None)) if room > 0 else (0, None)
            if case is None:
                break
            in_time = time.monotonic() + case.expected_s <= end_s
            if in_time and len(case.strikes) <= room:
                running[number] = case
                crew.play(number, case)
        if not running:
            return
        left_s = end_s - time.monotonic()
        ended = crew.next(max(0.0, left_s) if math.isfinite(left_s) else None)
        if ended is None:
            print(f"chaos: TIME IS UP: rounds {sorted(running)} are ended", flush=True)
            return
        number, found = ended
        wanted -= len(found.struck_s)
        yield number, running.pop(number), found


def tell(number: int, case: Case, found: Outcome, *, in_full: bool) -> None:
    strikes = "; ".join(map(str, case.strikes))
    passed = f"{len(found.struck_s)} of {len(case.strikes)} came to pass"
    passed += f", {len(found.joined)} joined" if case.recipe.restarts else ""
    print(
        f"{number}: {case.devices} devices, {case.recipe}; {strikes}: {passed}: "
        f"{found.wrong or 'well'} ({found.took_s:.1f} s)",
        flush=True,
    )
    if found.wrong or in_full:
        print("\n".join(found.lines[-80:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())

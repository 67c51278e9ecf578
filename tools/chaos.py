"""Chaos: devices are killed, paused, hung, cut off and starved at random; numbers must not change.

    python tools/chaos.py --faults 200 --seed 1          # local processes
    sudo python tools/chaos.py --lab --faults 200        # emulated devices, struck from outside too

Every round trains a small CNN in float64 on three to five devices, every second one with weights
that are cut by channels. Recipes differ: gradients clipped or added up, weights averaged, another
device than the first reads, plans change in the middle, lost devices are started again and join.
Those who are left must end with the weights of an undisturbed run, identical on all of them, within
the time limit; and every checkpoint that is kept must be whole and hold the weights, optimiser,
schedule, averages, random numbers and place in the data of an undisturbed run at its step. A round
is drawn from the seed and its number alone, so one that failed can be had again: --only NUMBER.

What happens: kill -9, a pause, a hang, broken connections, a full disk (as root: a file system of
its own), a jump of the time of day (as Python sees it, in one process); in the lab also a pulled
cable, a slow link, and a kill for memory, and there every device has a steady clock of its own.
Where: in the start, a batch, forward, notes, backward, commit, the optimiser's step, validation, a
checkpoint, a copy of cut weights, a change of plans, and in the recovery from another fault, the
return to a copy, and the welcome of a device that joins.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos_case import IN_LAB, INSIDE, Case, drawn
from chaos_forks import asked_of, server
from chaos_numbers import Tally
from chaos_round import Outcome, Round, is_root


class Right:
    """What undisturbed runs have after every step; each is made when it is first asked for."""

    def __init__(self, context: Any, folder: Path) -> None:
        self._context, self._folder = context, folder

    def of(self, case: Case) -> Path:
        shelf = self._folder / case.recipe.name
        if not shelf.exists():
            asked_of(self._context, "chaos_job:undisturbed", case.to_json(), shelf)
        return shelf


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="until so many came to pass")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--begin", type=int, default=0, help="the number of the first round")
    parser.add_argument("--only", type=int, help="the one round of that number")
    parser.add_argument("--lab", action="store_true", help="emulated devices; needs root")
    parser.add_argument("--devices", type=int, help="in every round; default: 3 to 5")
    parser.add_argument("--kinds", help="only these: kill,pause")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiplies all deadlines: the machine is busy"
    )
    return parser.parse_args(arguments)


def kinds_of(options: argparse.Namespace) -> Mapping[str, int]:
    kinds = dict(IN_LAB if options.lab else INSIDE)
    if options.kinds:
        kinds = {kind: kinds[kind] for kind in options.kinds.split(",")}
    if not options.lab:
        print("chaos: NO CABLE, LINK OR MEMORY IS TOUCHED: that needs --lab, and root")
    if not is_root() and kinds.pop("disk", None):
        print("chaos: NO DISK IS FILLED: that needs root, for a file system of its own")
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # labs and disks go first
    kinds, tally, context = kinds_of(options), Tally(), server()
    devices = (options.devices,) if options.devices else (3, 4, 4, 5)
    print(f"chaos: seed {options.seed}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            right = Right(context, Path(folder))
            for number in count(options.begin) if options.only is None else [options.only]:
                case = drawn(options.seed, number, kinds=kinds, devices=devices)
                one = Round(case, context, in_lab=options.lab, patience=options.patience)
                found = one.run(right.of(case))
                tally.add(number, case, found)
                tell(number, case, found, in_full=options.only is not None)
                if tally.faults >= options.faults:
                    break
    finally:  # also where it is ended before its time
        print("\n".join(tally.lines()), flush=True)
    return 1 if tally.failed else 0


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

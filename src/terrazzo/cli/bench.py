"""``terrazzo bench``: races against what a user would pick instead, and our own limits."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from terrazzo.cli.place import Place, add_lab_flags, say
from terrazzo.cli.report import save
from terrazzo.cli.verb import add_verb
from terrazzo.cluster import Hosts
from terrazzo.cluster.hosts import available_cores
from terrazzo.errors import UsageError
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.start import emulated, not_emulated, unshaped
from terrazzo.records.machine import Machine
from terrazzo.records.run import RunFolder

if TYPE_CHECKING:
    from terrazzo.bench.cases import Case
    from terrazzo.bench.record import Provenance, Race

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

RUNS = Path("runs")
EXAMPLES = """\
examples:
  terrazzo bench race --on 2 --model yolov2-small --batch 2
      on two processes of this machine: one device, DDP, FSDP2, pipeline, Terrazzo; two minutes
  terrazzo bench race --on 6xpi3 --model yolov2-front --batch 1,6
      on six emulated boards (as root: shaped links, slow cores, little memory)
  terrazzo bench paper --on 2xpi3 --batch 1
      the published experiment, beside the published figures
  terrazzo bench core
      overhead, bytes, shares and planning time, beside their limits
"""
RACE_EXAMPLES = """\
examples:
  terrazzo bench race --on 6xpi3 --model yolov2-front --batch 1,6
  terrazzo bench race --on 2xpi3 --on 4xpi3 --on 6xpi3 --model resnet18 --batch 6
      three clusters, one after the other; the page draws the speedup over devices
  terrazzo bench race --standard
      every model and cluster of docs/benchmarks.md, five minutes each: more than an hour
  terrazzo bench race --on 4xpi4 --model unet32 --batch 1 --peers alone,each,one
  terrazzo bench race --on 6xpi3 --model yolov2-front --batch 1 --terrazzo "tiles:3x2 4"
      also Terrazzo with this layout in four groups; "auto each": the planner's layouts, with an
      exchange at every operator
  terrazzo bench race --on 4xpi3 --model yolov2-front --batch 6 --threads 4 --processes 4
      four threads a device, each in a process of its own: 16 processes share the work
  terrazzo bench race --on 3 --model resnet18 --batch 3 --size 64 --plan plan.json
      also a plan that was saved

A race takes about five minutes (--minutes), lab included: every peer has one turn, and more as
long as time is left. The table says how many steps were measured.

All peers train the same step from the same weights on the same images, in turns; their gradients
are compared with plain PyTorch's. A peer that can't do it is a row that says why, and counts as
beaten by nobody. Exit status: 0 measured, 1 a peer that promises the same gradients had others,
2 not run.
"""
PAPER_EXAMPLES = """\
examples:
  terrazzo bench paper
      YOLOv2's first 17 operators on 2 to 6 emulated Raspberry Pi 3, batches 1 to 6: hours
  terrazzo bench paper --on 2xpi3 --on 6xpi3 --batch 1
  terrazzo bench paper --on 4xpi3 --batch 1 --threads 4 --minutes 10
      also devices of four threads, in one process and in four, against one core

Speedup, memory and the curve of grouping (one layout, only the borders of groups differ), beside
the published 2x to 15x over one core, 8x less memory, and 1.5x from grouping.
"""


def add_to(commands: Commands) -> None:
    parser = add_verb(commands, "bench", "measure: races against peers, our own limits", EXAMPLES)
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    raced = add_verb(below, "race", "race against what you would pick instead", RACE_EXAMPLES)
    raced.add_argument(
        "--on", action="append", metavar="6xpi3",
        help="the devices: 6xpi3 (emulated), 4 (local processes); more than once for several",
    )  # fmt: skip
    raced.add_argument("--model", metavar="NAME", help="a model of the zoo")
    raced.add_argument(
        "--standard", action="store_true",
        help="instead of --on, --model and --batch: the cases of docs/benchmarks.md, one by one",
    )  # fmt: skip
    raced.add_argument("--batch", default="1", metavar="1,6", help="images a step (default: 1)")
    raced.add_argument("--size", type=int, metavar="SIDE", help="height and width of an image")
    raced.add_argument(
        "--peers", metavar="NAMES",
        help="some of them only, such as alone,ddp,each; '' for none beside --plan and --terrazzo",
    )  # fmt: skip
    raced.add_argument(
        "--terrazzo", action="append", default=[], metavar="'LAYOUT GROUPS'",
        help="also Terrazzo with this layout and these groups; auto: as the planner has them",
    )  # fmt: skip
    raced.add_argument(
        "--plan", type=Path, action="append", default=[], metavar="FILE",
        help="also Terrazzo with this plan",
    )  # fmt: skip
    raced.add_argument("--threads", type=int, default=0, help="of each device (default: one)")
    raced.add_argument(
        "--processes", type=int, default=1, help="in each device, sharing its threads (default: 1)"
    )
    _add_rules(raced)
    raced.set_defaults(command=race)
    papered = add_verb(below, "paper", "the published experiment", PAPER_EXAMPLES)
    papered.add_argument("--on", action="append", metavar="6xpi3", help="only these devices")
    papered.add_argument("--batch", metavar="1,6", help="only these batches")
    papered.add_argument("--model", default="yolov2-front", help="other than %(default)s")
    papered.add_argument("--size", type=int, metavar="SIDE", help="other than 416")
    papered.add_argument(
        "--threads", type=int, default=4,
        help="also devices of so many threads, as one process and as one for each, against one "
        "core, where this machine has the cores (default: 4; 1: not)",
    )  # fmt: skip
    _add_rules(papered)
    papered.set_defaults(command=paper)
    cored = add_verb(below, "core", "overhead, bytes, shares, planning time", CORE_EXAMPLES)
    cored.add_argument("--save", type=Path, metavar="FILE", help="also write them as JSON")
    cored.set_defaults(command=core)


CORE_EXAMPLES = """\
examples:
  terrazzo bench core
  terrazzo bench core --save core.json
"""


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=5.0,
        help="for each case: rounds go on as long as time is left (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each peer, at most (default: 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of measured steps in a turn (default: 6)"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS",
        help="a turn longer than this is ended (default: 300)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER",
        help="where race.json and race.html go (default: a new folder in runs)",
    )  # fmt: skip
    add_lab_flags(parser)


def core(options: argparse.Namespace) -> int:
    from terrazzo.bench.__main__ import run

    return run(options.save)


def race(options: argparse.Namespace) -> int:
    from terrazzo.bench import peers
    from terrazzo.bench.cases import standard_cases
    from terrazzo.bench.page import page

    if options.standard and (options.on or options.model):
        raise UsageError("--standard brings its own devices and models: leave out --on and --model")
    cases = standard_cases() if options.standard else _asked_cases(options)
    for path in options.plan:
        _require_plan(path)
    asked = peers.NAMES if options.peers is None else options.peers.split(",")
    names = [name for name in asked if name]
    names += [f"terrazzo {text}" for text in options.terrazzo]
    names += [f"plan {path.resolve()}" for path in options.plan]
    if not names:
        raise UsageError(
            "--peers names nobody: leave it out for all, or give --plan or --terrazzo as well"
        )
    races, provenance, folder = _hold(options, cases, names)
    _save(folder, provenance, page(races, provenance))
    return int(any(row.broke_promise for held in races for row in held.rows))


def _require_plan(path: Path) -> None:
    """What is no plan is told before anything starts."""
    from terrazzo.records import Plan

    try:
        Plan.load(path)
    except OSError as error:
        raise UsageError(
            f"--plan {path} cannot be read: {error.strerror}; make one with terrazzo plan --save"
        ) from error
    except (UsageError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {path}: {error}") from error


def _asked_cases(options: argparse.Namespace) -> list[Case]:
    from terrazzo.bench.cases import Case, parse_batches
    from terrazzo.zoo import NAMES

    if not options.on or not options.model:
        raise UsageError("a race needs --on and --model, such as --on 2 --model yolov2-small")
    if options.model not in NAMES:
        raise UsageError(f"no model {options.model!r} in the zoo; there are {', '.join(NAMES)}")
    return [
        Case.of(
            options.model,
            on=on,
            batch=batch,
            side=options.size,
            threads=options.threads,
            processes=options.processes,
        )
        for on in options.on
        for batch in parse_batches(options.batch)
    ]


def paper(options: argparse.Namespace) -> int:
    from terrazzo.bench import paper as published
    from terrazzo.bench.cases import Case, parse_batches
    from terrazzo.bench.page import page
    from terrazzo.bench.paperview import markup, show

    batches = parse_batches(options.batch) if options.batch else published.BATCHES
    cases = [
        Case.of(
            options.model, on=on, batch=batch, side=options.size, threads=threads, processes=number
        )
        for on in options.on or published.CLUSTERS
        for threads, number in published.divisions(options.threads, available_cores())
        for batch in batches
    ]
    races, provenance, folder = _hold(options, cases, published.PEERS, more=published.to_dict)
    show(races, Console(highlight=False))
    _save(folder, provenance, page(races, provenance, extra=markup(races)))
    return int(any(row.broke_promise for held in races for row in held.rows))


def _hold(
    options: argparse.Namespace,
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    more: Callable[[Sequence[Race]], dict[str, Any]] = lambda races: {},
) -> tuple[list[Race], Provenance, Path]:
    """Every case, each cluster made once; a table as soon as there is one."""
    from terrazzo.bench import peers
    from terrazzo.bench.race import Rules, hold_race
    from terrazzo.bench.record import Provenance, to_json
    from terrazzo.bench.table import table
    from terrazzo.bench.truth import Truths

    if options.rounds < 1 or options.limit < 1 or min(options.seconds, options.minutes) <= 0:
        raise UsageError("--minutes, --rounds, --seconds and --limit must be positive")
    for name in names:
        peers.find(name)  # a misspelt one is told before anything is measured
    rules = Rules(60 * options.minutes, options.rounds, options.seconds, options.limit)
    clusters = dict.fromkeys((case.on, case.threads) for case in cases)
    places = {cluster: _place(options, *cluster) for cluster in clusters}
    provenance = Provenance(_typed(), _commit(), asdict(Machine.here()), ())
    folder = RunFolder.take(options.save) if options.save else RunFolder.create(RUNS, "race")
    console, races, truths = Console(highlight=False), [], Truths()
    try:
        for (on, threads), place in places.items():
            began_s = time.monotonic()
            with place.open() as hosts:
                notes = (*provenance.notes, *_missing(on, place, hosts))
                provenance = replace(provenance, notes=notes)
                for case in (c for c in cases if (c.on, c.threads) == (on, threads)):
                    left_s = max(0.0, rules.budget_s - (time.monotonic() - began_s))
                    held = hold_race(
                        case, hosts, _meant(names, case), rules=replace(rules, budget_s=left_s),
                        truths=truths, scratch=folder.path, say=say,
                    )  # fmt: skip
                    began_s = time.monotonic()
                    races.append(held)
                    console.print(table(held))
                    save(folder.file("race.json"), to_json(races, provenance, **more(races)) + "\n")
    finally:
        if not races:
            folder.discard()
    return races, provenance, folder.path


def _meant(names: Sequence[str], case: Case) -> list[str]:
    """One core of a device is no row of its own where a device is one core."""
    return [name for name in names if name != "core" or case.threads > 1]


def _place(options: argparse.Namespace, on: str, threads: int) -> Place:
    place = Place.read(argparse.Namespace(**{**vars(options), "on": on}))
    return replace(place, threads=threads)


def _missing(on: str, place: Place, hosts: Hosts) -> list[str]:
    """What numbers of a cluster leave out, for whoever reads them later."""
    if isinstance(hosts, LabHosts):
        return [emulated(hosts, checked=place.verify), f"{on}: {not_emulated(hosts)}"]
    if place.topology is None:
        return [f"{on}: processes of this machine, nothing is emulated"]
    return [unshaped(place.topology, "--unshaped" if place.unshaped else "without root")]


def _save(folder: Path, provenance: Provenance, text: str) -> None:
    save(folder / "race.html", text)
    say(provenance.text)
    say(f"written: {folder / 'race.json'}, {folder / 'race.html'}")


def _typed() -> str:
    return shlex.join(["terrazzo", *sys.argv[1:]])


def _commit() -> str:
    """Of the checkout this package is in; nothing if it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()

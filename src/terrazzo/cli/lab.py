"""``terrazzo lab``: emulated clusters, looked at, measured, disturbed and cleaned up."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from terrazzo.cli.place import add_presets_flag, read_topology, say
from terrazzo.cli.verb import add_verb
from terrazzo.errors import LabError, UsageError
from terrazzo.lab import faults, state
from terrazzo.lab.calibrate import calibrate
from terrazzo.lab.clean import remove_dead
from terrazzo.lab.faults import Fault
from terrazzo.lab.groups import find_groups
from terrazzo.lab.hosts import LabHosts, require_root
from terrazzo.lab.preset import load_presets
from terrazzo.lab.probes import Probes
from terrazzo.lab.running import RunningLab
from terrazzo.lab.start import emulated, not_emulated
from terrazzo.lab.verify import TOLERANCE, Figure, Verification, headings, verify

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo lab show
      the kinds of devices there are, and the labs that run
  terrazzo lab verify --on 6xpi3
      make six emulated devices, measure inside them, print it beside what was asked for
  terrazzo lab fault cut pi3-2 --at-step 5
      in the lab that runs: pull the cable of pi3-2 once step 5 is done
  terrazzo lab clean
      remove what labs left whose process was killed

A training runs on emulated devices with: sudo terrazzo run --on 6xpi3 train.py
"""
VERIFY_EXAMPLES = """\
examples:
  terrazzo lab verify --on 6xpi3
  terrazzo lab verify --on 2xpi5,3xpi3 --tolerance 0.05
  terrazzo lab verify --on 4xpi4:wifi --presets my-boards.toml

Compute rate, link rate both ways, round trip and memory limit, all devices busy at once. The round
trip is shown and not judged. Exit status: 0 within the tolerance, 1 outside, 2 not made.
"""
FAULT_EXAMPLES = """\
examples:
  terrazzo lab fault cut pi3-2                       pull the cable of pi3-2, now
  terrazzo lab fault slow pi3-2 --mbit 10            its link at 10 Mbit/s, both ways
  terrazzo lab fault kill 2 --at-step 5              every process of device 2 ends after step 5
  terrazzo lab fault pause 2 --after 10              stand still in 10 s; resume lets it go on
  terrazzo lab fault fill 2 --leave 50               take its memory, but for 50 MiB
  terrazzo lab fault restore 2                       cable in, full rate, going on, memory free
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "lab",
        help="emulated clusters: show, verify, fault, clean",
        description="Emulated clusters of small devices on this machine (Linux, root).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shown = add_verb(below, "show", "the kinds of devices, and the labs that run")
    add_presets_flag(shown)
    shown.set_defaults(command=show)
    add_verb(below, "clean", "remove what dead labs left").set_defaults(command=clean)
    verified = add_verb(below, "verify", "measure emulated devices", VERIFY_EXAMPLES)
    verified.add_argument("--on", required=True, metavar="6xpi3", help="the devices")
    add_presets_flag(verified)
    verified.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="PART",
        help="how far off is still right (default: %(default)g)",
    )  # fmt: skip
    verified.set_defaults(command=verify_lab)
    _add_fault(add_verb(below, "fault", "disturb a lab that runs", FAULT_EXAMPLES))


def _add_fault(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=faults.KINDS, help="what happens")
    parser.add_argument("device", help="a device's name or number")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="not now, later")
    when.add_argument("--at-step", type=int, metavar="N", help="once step N of the run is done")
    parser.add_argument("--mbit", type=float, metavar="RATE", help="for slow: the new rate")
    parser.add_argument("--leave", type=float, metavar="MIB", help="for fill: what is left free")
    parser.add_argument("--lab", metavar="NAME", help="which lab, where several run")
    parser.set_defaults(command=fault)


# ---- show, clean ----------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("preset", "GFLOP/s", "cores", "MiB", "wire", "wifi", "read", "watts"):
        table.add_column(heading, justify="left" if heading == "preset" else "right", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for preset in load_presets(options.presets).values():
        links = (preset.wire, preset.wifi)
        speeds = [None if link is None else link.bits_per_s / 1e6 for link in links]
        read = preset.storage.read_bytes_per_s / 1e6 if preset.storage else None
        numbers = (preset.flops_per_s / 1e9, preset.threads, preset.memory_bytes / 2**20)
        row = [_number(value) for value in (*numbers, *speeds, read, preset.watts)]
        table.add_row(preset.name, *row, Text(preset.about))
    console.print(table)
    console.print("wire and wifi in Mbit/s of payload, read in MB/s; sources: docs/lab.md")
    running = state.states()
    for lab in running:
        place = f", recording in {lab.run_folder}" if lab.run_folder else ""
        names = ", ".join(lab.devices.names)
        console.print(f"\nlab {lab.lab} (process {lab.process}{place}): {names}", soft_wrap=True)
    if not running:
        console.print("\nno lab runs on this machine")
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def clean(options: argparse.Namespace) -> int:
    require_root()
    with state.alone():
        removed = remove_dead(find_groups())
    for lab in removed:
        print(f"removed what lab {lab} left")
    if not removed:
        print("nothing to clean: no lab left anything behind")
    return 0


# ---- verify ---------------------------------------------------------------------------------


def verify_lab(options: argparse.Namespace) -> int:
    if not 0 < options.tolerance < 1:
        raise UsageError(f"--tolerance {options.tolerance:g} must be between 0 and 1, such as 0.1")
    topology = read_topology(options.on, options.presets)
    with LabHosts.open(topology) as hosts, Probes.start(hosts) as probes:
        calibrate(hosts, probes)
        say(emulated(hosts, checked=True))
        say(not_emulated(hosts))
        found = verify(hosts, probes, tolerance=options.tolerance)
    show_verification(found, options.tolerance)
    return 0 if found.ok else 1


def show_verification(found: Verification, tolerance: float) -> None:
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for heading in headings(found):
        table.add_column(heading, justify="right")
    asked = [_scaled(figure, figure.wanted) for figure in found.devices[0]]
    kinds = {tuple(figure.wanted for figure in figures) for figures in found.devices}
    if len(kinds) == 1:
        table.add_row("asked for", *asked, style="dim", end_section=True)
    for name, figures in zip(found.names, found.devices, strict=True):
        table.add_row(name, *(_cell(figure, len(kinds) > 1) for figure in figures))
    console.print(table)
    if len(kinds) > 1:
        console.print("seen/asked for", style="dim")
    for figure in found.together:
        console.print(Text(f"all devices: {figure}", style="" if figure.ok else "bold red"))
    if found.ok:
        console.print(f"within {tolerance:.0%} of what was asked for", style="bold green")
    else:
        console.print(f"OUTSIDE {tolerance:.0%}: {'; '.join(found.problems)}", style="bold red")


def _cell(figure: Figure, with_wish: bool) -> Text:
    text = _scaled(figure, figure.seen)
    if with_wish and figure.wanted:
        text += f"/{_scaled(figure, figure.wanted)}"
    return Text(text, style="" if figure.ok else "bold red")


def _scaled(figure: Figure, value: float | None) -> str:
    if value is None:
        return ""
    number = value / figure.scale
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


# ---- faults ---------------------------------------------------------------------------------


def fault(options: argparse.Namespace) -> int:
    require_root()
    chosen = _running(options.lab)
    with ExitStack() as cleanup:
        lab = RunningLab.attach(chosen)
        cleanup.callback(lab.network.close)
        planned = _fault(options, lab)
        folder = Path(chosen.run_folder) if chosen.run_folder else None
        alive = lambda: state.is_alive(chosen.lab)  # noqa: E731
        if not faults.wait_for(planned, run_folder=folder, goes_on=alive):
            raise LabError(f"lab {chosen.lab} ended before the fault was due; nothing was done")
        faults.carry_out(planned, lab)
        print(f"{planned.kind} {lab.topology.names[planned.device]}: done")
    return 0


def _fault(options: argparse.Namespace, lab: RunningLab) -> Fault:
    given = {faults.SLOW: (options.mbit, 1e6), faults.FILL: (options.leave, 2**20)}
    number, scale = given.get(options.kind, (None, 1.0))
    return Fault(
        options.kind,
        lab.number_of(options.device),
        value=None if number is None else number * scale,
        after_s=options.after,
        at_step=options.at_step,
    )


def _running(name: str | None) -> state.LabState:
    found = [lab for lab in state.states() if name in (None, lab.lab)]
    if len(found) == 1:
        return found[0]
    if not found:
        which = f"lab {name}" if name else "lab"
        raise LabError(f"no {which} runs here; start one: sudo terrazzo run --on 6xpi3 train.py")
    names = ", ".join(lab.lab for lab in found)
    raise UsageError(f"{len(found)} labs run: choose one with --lab, of {names}")

"""``terrazzo cluster``: what devices and their links can do, measured and kept for planning."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from terrazzo.cli.discovery import add_discovery
from terrazzo.cli.inspect import add_check
from terrazzo.cli.place import Place, add_lab_flags, cluster_place, say
from terrazzo.cli.setup import add_setup
from terrazzo.cli.verb import add_verb
from terrazzo.cluster import Hosts
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import UsageError
from terrazzo.lab.hosts import is_root
from terrazzo.lab.measuring import measure
from terrazzo.measure.job import CPU, parse_lie_on
from terrazzo.measure.key import MODEL, profile_key
from terrazzo.measure.store import ProfileStore
from terrazzo.planner.feedback import slowed
from terrazzo.records import Graph
from terrazzo.records.profile import Profile
from terrazzo.records.units import seconds_text
from terrazzo.report.outcome import outcome
from terrazzo.report.profileview import show_profile
from terrazzo.report.reading import Reading
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

BUDGET_S = 25.0
KEPT_THERE = Path("~/.cache/terrazzo/profiles")
"""Where devices look for what was measured, when they plan."""
LEAST_BUDGET_S = 0.5

EXAMPLES = """\
examples:
  terrazzo cluster discover --write cluster.toml
      devices on this network that run terrazzo cluster announce
  terrazzo cluster check --on cluster.toml
      are they ready, and what is to be fixed?
  terrazzo cluster profile net.py:build --input 8x3x224x224
      this machine alone, as one device
  terrazzo cluster profile net.py:build --input 1x3x416x416 --on 4
      four processes here, measured at once, and the links between them
  sudo terrazzo cluster profile yolov2 --input 1x3x416x416 --on 6xpi3
      six emulated boards
  terrazzo cluster profile --show profile.json
      a profile that was kept
"""
PROFILE_EXAMPLES = """\
examples:
  terrazzo cluster profile net.py:build --input 8x3x224x224 --on 4 --save profile.json
  terrazzo cluster profile net.py:build --input 1x3x416x416 --on 6xpi3 --again
  terrazzo cluster profile net.py:build --input 8x3x224x224 --on 2 --device cpu,cuda
  terrazzo cluster profile --show profile.json
  terrazzo cluster profile --from runs/20260131-142530-train

Times the operators of a model on boxes of several sizes, all devices at once, then the links
between devices. What was found is kept for this model, these devices, this version of torch, these
thread counts, this power state and these GPUs, and used again until one of them changes. With
--from nothing is measured: the profile of a recorded run is corrected by how long its devices
computed.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "cluster",
        help="real devices: find, pair, check, measure",
        description="Find devices, see whether they are ready, measure them and their links.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    measured = add_verb(
        below, "profile", "time a model's operators and the links, and keep it", PROFILE_EXAMPLES
    )
    measured.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="FILE.py:CALLABLE, MODULE:CALLABLE, or a model of the zoo",
    )
    measured.add_argument(
        "--input", action="append", default=[], metavar="SHAPE[:TYPE]",
        help="shape of an input, such as 2x3x224x224; again for each further input",
    )  # fmt: skip
    measured.add_argument(
        "--on", default="1", metavar="N",
        help="devices: 4 processes here, 6xpi3 emulated, or a cluster.toml (default: %(default)s)",
    )  # fmt: skip
    measured.add_argument(
        "--device", default=CPU, metavar="WHERE",
        help="where nets lie: cpu, cuda, or one for each device, such as cpu,cuda:0 "
        "(default: %(default)s)",
    )  # fmt: skip
    measured.add_argument("--again", action="store_true", help="measure even if nothing changed")
    measured.add_argument("--save", type=Path, metavar="FILE", help="write it here too")
    measured.add_argument("--show", type=Path, metavar="FILE", help="only show a kept profile")
    measured.add_argument(
        "--from", dest="run", type=Path, metavar="RUN",
        help="correct the profile of a recorded run by what it took, and keep it",
    )  # fmt: skip
    measured.add_argument(
        "--seconds", type=float, default=BUDGET_S, metavar="S",
        help="most that operators may take on each device (default: %(default)g)",
    )  # fmt: skip
    add_lab_flags(measured)
    measured.set_defaults(command=profile)
    add_check(below)
    add_setup(below)
    add_discovery(below)


def profile(options: argparse.Namespace) -> int:
    if options.show is not None:
        show_profile(Profile.load(options.show), Screen())
        return 0
    if options.run is not None:
        _correct(options)
        return 0
    if options.model is None or not options.input:
        raise UsageError("name a MODEL and its --input SHAPE, or --show FILE for a kept profile")
    if not options.seconds >= LEAST_BUDGET_S:
        raise UsageError(f"--seconds {options.seconds:g}: give at least {LEAST_BUDGET_S:g}")
    place = Place.read(options, real=True)
    lie_on = _lie_on(options.device, place)
    asked = _Asked(_graph(options), place, str(options.on), options.seconds, lie_on)
    store = ProfileStore.usual(os.environ)
    with ExitStack() as cleanup:
        if place.cluster is not None:  # what its devices have installed is known only there
            reached = cleanup.enter_context(place.open())
            assert isinstance(reached, SshHosts)
            asked = replace(asked, reached=reached)
        found = obtain(asked, store, again=options.again)
        if asked.reached is not None:
            asked.reached.leave(store.path(found.key), KEPT_THERE / store.path(found.key).name)
    if options.save is not None:
        found.save(options.save)
        say(f"saved as {options.save}")
    show_profile(found, Screen())
    return 0


def _correct(options: argparse.Namespace) -> None:
    """The profile that a run was planned with, corrected by how it went."""
    folder = options.run
    found = outcome(Reading.open(folder))
    if found is None:
        raise UsageError(
            f"{folder} says nothing to correct a profile by: record a run of at least two steps "
            "that was planned with a profile (terrazzo cluster profile measures one)"
        )
    before = Profile.load(folder / "profile.json")
    for device in before.devices:
        if device.accelerator:
            raise UsageError(
                f"the net of {device.name} lay on {device.accelerator}: {folder} says when work "
                "was handed to it, not how long that took; measure again with --again"
            )
    after = replace(slowed(before, found.slowness), measured_s=time.time())
    for device, times in zip(before.devices, found.slowness, strict=True):
        say(f"{device.name} computes {times:.2f} times as long as was thought")
    if MODEL in before.key:
        path = ProfileStore.usual(os.environ).keep(after)
        say(f"kept as {path}, for the next run; terrazzo cluster profile --again measures anew")
    elif options.save is None:
        raise UsageError(
            f"the profile of {folder} is a guess, which is not kept: write it with --save FILE"
        )
    if options.save is not None:
        after.save(options.save)
        say(f"saved as {options.save}")


def _lie_on(text: str, place: Place) -> tuple[str, ...]:
    """What nets lie on, for each device; what this machine has not got is said at once."""
    found = parse_lie_on(text, place.devices)
    if place.cluster is not None or set(found) == {CPU}:
        return found  # devices that are reached look for themselves
    if place.topology is not None:
        raise UsageError(f"--device {text}: emulated boards have no GPU; leave --device out")
    import torch  # not for --help

    from terrazzo.measure.accelerator import absent

    for one in found:
        if reason := absent(torch.device(one)):
            raise UsageError(f"--device {one}: {reason}")
    return found


def _titles(lie_on: Sequence[str]) -> list[str]:
    import torch

    from terrazzo.measure.accelerator import title

    return [title(torch.device(one)) for one in lie_on]


def _graph(options: argparse.Namespace) -> Graph:
    from terrazzo.cli.model import ModelReference
    from terrazzo.cli.plan import exported
    from terrazzo.cli.tensor import TensorSpec

    model = ModelReference.parse(options.model).build().train()
    return exported(model, [TensorSpec.parse(text) for text in options.input])[0]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model, where to measure it, for how long at most, and what its nets lie on there."""

    graph: Graph
    place: Place
    on: str
    budget_s: float
    lie_on: tuple[str, ...]
    reached: SshHosts | None = None

    @property
    def is_emulated(self) -> bool:
        return self.place.topology is not None and not self.place.unshaped and is_root()

    @property
    def key(self) -> Mapping[str, str]:
        if self.reached is not None:
            facts, cluster = self.reached.facts, self.reached.cluster
            threads = [
                device.threads or fact.cores
                for device, fact in zip(cluster.devices, facts, strict=True)
            ]
            there = repr([(fact.system, fact.python, *fact.versions.items()) for fact in facts])
            key = profile_key(
                self.graph,
                place=cluster_place(cluster),
                threads=threads,
                emulated=f"{cluster.encrypt} {there}",
                accelerators=["" if one == CPU else one for one in self.lie_on],
            )
            return {**key, "torch": facts[0].versions["torch"]}
        topology, local = self.place.topology, self.place.local
        if topology is not None and self.is_emulated:
            threads = [device.threads for device in topology.devices]
            return profile_key(
                self.graph, place=self.on, threads=threads, emulated=topology.to_json()
            )
        count = self.place.devices
        environment = (local or _processes(count)).environment(0, port=0, base=os.environ)
        threads = [int(environment["OMP_NUM_THREADS"])] * count
        return profile_key(
            self.graph,
            place=f"{count} local",
            threads=threads,
            accelerators=_titles(self.lie_on),
        )


def _processes(count: int) -> Hosts:
    from terrazzo.cluster import LocalHosts

    return LocalHosts(count)


def obtain(asked: _Asked, store: ProfileStore, *, again: bool = False) -> Profile:
    """A kept profile that still holds, or a new one, which is kept."""
    key = asked.key
    if not again:
        kept = store.find(key)
        if kept.profile is not None:
            age_s = max(0.0, time.time() - kept.profile.measured_s)
            say(f"nothing changed since this was measured {seconds_text(age_s)} ago; --again anew")
            return kept.profile
        say(f"measuring: {kept.reason}")
    began_s = time.monotonic()
    found = measured(asked, key)
    path = store.keep(found)
    say(f"measured in {seconds_text(time.monotonic() - began_s)}, kept as {path}")
    return found


def measured(asked: _Asked, key: Mapping[str, str]) -> Profile:
    console = Console(stderr=True, highlight=False)
    if asked.reached is not None:
        asked.reached.bring(None)
    opened = nullcontext(asked.reached) if asked.reached is not None else asked.place.open()
    with opened as hosts, console.status("starting the devices ...") as status:
        return measure(
            hosts,
            asked.graph,
            key=key,
            budget_s=asked.budget_s,
            tell=lambda t: status.update(t),
            lie_on=asked.lie_on,
        )

"""``terrazzo plan``: how a model would be cut, and what a step would take; nothing is run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli import thrift
from terrazzo.cli.forecast import show_forecast, show_help, show_rejected
from terrazzo.cli.model import ModelReference, add_model
from terrazzo.cli.place import add_presets_flag, cluster_place, is_file, read_topology
from terrazzo.cli.tensor import TensorSpec
from terrazzo.cluster import LocalHosts
from terrazzo.errors import UsageError
from terrazzo.measure.job import CPU, parse_lie_on
from terrazzo.measure.key import PLACE, refuse_other
from terrazzo.measure.known import kept_profile
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.cost import predict
from terrazzo.planner.fitting import needed
from terrazzo.planner.guess import LATENCY_S, Figures, guessed
from terrazzo.planner.search import ENERGY, MEMORY, TIME, Found, Tried
from terrazzo.planner.wishes import DELIVERY
from terrazzo.records import Graph, Plan
from terrazzo.records.cluster import Cluster
from terrazzo.records.profile import Profile
from terrazzo.records.units import bytes_text, count_text
from terrazzo.report.planview import view
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show_plan
from terrazzo.schedule import Program, lower
from terrazzo.schedule.ledger import Footprint
from terrazzo.schedule.memory import footprints
from terrazzo.schedule.training import EVERYTHING, STATES, Training
from terrazzo.schedule.work import work

if TYPE_CHECKING:
    from torch import nn

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo plan net.py:build --input 8x3x224x224 --on 6xpi3
      the fastest plan for six boards: groups, layouts, seconds, memory, what limits, what helps
  terrazzo plan net.py:build --input 8x3x224x224 --on 6xpi3 --profile profile.json
      the same with what terrazzo cluster profile has measured
  terrazzo plan net.py:build --input 8x3x224x224 --on 2xpi5,3xpi3 --objective energy
      which devices take part, in which modes, for the least energy; --power-budget 20W for all
  terrazzo plan unet32 --input 1x3x1024x1024 --memory 950MiB
      one device with little memory: what is kept, what is computed again, and what that costs
  terrazzo plan unet32 --input 1x3x1024x1024 --memory 1100MiB --optimizer adam
      the same where Adam keeps its averages in this memory, too
  terrazzo plan net.py:build --input 8x3x224x224 --on 4 --groups one --save plan.json
      keep a plan, with devices and modes where those were chosen; terrazzo run --plan plan.json
      trains by it, and so does tz.parallelize(model, (x,), tz.Plan.load("plan.json"))

Nothing is trained and no device needs to be there. Seconds come from a profile: the one given, one
that was kept for this model and these devices, or for emulated devices a guess from their figures.
Without --memory a plan has to fit into what each device has beside an idle process. Memory is what
a training step takes on top of the idle process (about 220 MiB with torch and an optimiser loaded),
with what --optimizer keeps. Parameters that require no gradients in the model as it is built are
taken to stay frozen.
A step begins with the input: tz.feed reads on one device and sends every other its part.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="show how a model would be cut, and what a step would take",
        description="Show how a model would be cut over devices, what a training step would take "
        "in time and memory, and what fitting it into less would cost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument(
        "--on", default="1", metavar="N",
        help="devices: a number, or kinds such as 6xpi3 or 2xpi5,3xpi3 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="what terrazzo cluster profile measured"
    )
    parser.add_argument(
        "--device", default=CPU, metavar="WHERE",
        help="of kept profiles, one of nets that lie there: cpu, cuda, or one for each device "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--objective", choices=(TIME, MEMORY, ENERGY), default=TIME,
        help="what shall be least (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", default="auto", help="tiles:ROWSxCOLS, samples:N, channels:N, whole, or auto"
    )
    parser.add_argument(
        "--groups", default="auto", help="each, one, a number, or layers that end groups: a,b,c"
    )
    parser.add_argument(
        "--passes", type=int, default=0, help="strips per group, computed again in backward"
    )
    parser.add_argument(
        "--memory",
        help="most that a step may take on a device: 700MiB; or one for each: 700MiB,3GiB",
    )
    parser.add_argument(
        "--power-budget", metavar="WATTS", help="most that all devices together may draw: 20W"
    )
    parser.add_argument(
        "--power", action="append", default=[], metavar="[DEVICE=]FILE",
        help="modes that terrazzo power tune --save measured on such a device; for each kind one",
    )  # fmt: skip
    parser.add_argument(
        "--delivery", choices=tuple(DELIVERY), default="uint8",
        help="how the input travels from the one device that reads it, in a step's time; none: "
        "every device has its own (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=tuple(STATES), default=EVERYTHING.optimizer,
        help="what it keeps of the weights is counted, and what its step takes: sgd nothing, "
        "momentum as much as the weights, adam twice that (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--eval", action="store_true", help="evaluation mode, not training")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    add_presets_flag(parser)
    parser.set_defaults(command=plan)


def plan(options: argparse.Namespace) -> int:
    devices, figures, watts = _cluster(options)
    objective = TIME if options.objective == ENERGY else options.objective
    model = ModelReference.parse(options.model).build().train(not options.eval)
    graph, trained = exported(model, [TensorSpec.parse(text) for text in options.input])
    wishes = Wishes(
        options.layout, options.groups, options.passes, options.memory, objective,
        delivered=DELIVERY[options.delivery],
        training=replace(trained, optimizer=options.optimizer),
    )  # fmt: skip
    profile = _profile(options, graph, devices, figures)
    screen = Screen()
    _tell_training(graph, wishes.training, screen)
    if thrift.is_thrifty(options):
        if profile is None:
            raise UsageError(
                "energy is planned by seconds and watts: measure these devices with terrazzo "
                "cluster profile, or name kinds, such as --on 6xpi3"
            )
        known = replace(wishes, profile=profile)
        best = thrift.choose(graph, known, options, watts=watts, screen=screen)
        chosen = thrift.seated(best, profile)
        show_plan(view(graph, chosen), screen)
        prediction = predict(lower(graph, chosen), wishes.prices(best.profile))
        show_forecast(graph, chosen, prediction, profile=best.profile, limits=None, screen=screen)
    elif profile is None:
        chosen = wishes.plan(graph, devices)
        show(graph, chosen, wishes, screen)
    else:
        chosen = _forecast(graph, replace(wishes, profile=profile), screen)
    if options.save:
        chosen.save(options.save)
        print(f"saved as {options.save}")
    return 0


def _cluster(
    options: argparse.Namespace,
) -> tuple[int, Profile | None, Sequence[float | None]]:
    """How many devices, and for kinds that have figures a guess of what they can do and draw."""
    text = str(options.on)
    if text.isascii() and text.isdigit() and int(text) > 0:
        return LocalHosts.parse(text).devices, None, ()
    if is_file(text):
        return len(Cluster.load(Path(text)).devices), None, ()
    topology = read_topology(text, options.presets)
    air = topology.air_bits_per_s
    figures = [
        Figures(
            device.name,
            device.flops_per_s,
            device.memory_bytes,
            device.link.bits_per_s / 8,
            max(LATENCY_S, device.link.delay_s),
        )
        for device in topology.devices
    ]
    watts = [device.watts for device in topology.devices]
    return len(figures), guessed(figures, air_bytes_per_s=air and air / 8), watts


def _profile(
    options: argparse.Namespace, graph: Graph, devices: int, guess: Profile | None
) -> Profile | None:
    """The profile that was asked for, or kept for this model and these devices, or a guess."""
    if options.profile is not None:
        found = Profile.load(options.profile)
        if len(found.devices) != devices and options.on != "1":
            raise UsageError(
                f"{options.profile} is of {len(found.devices)} devices, --on {options.on} are "
                f"{devices}: say --on {len(found.devices)}, or measure these"
            )
        if not options.eval:  # what was measured is training, evaluation is a part of it
            refuse_other(found.key, graph, running=False)
        return found
    wanted = [one != CPU for one in parse_lie_on(options.device, devices)]

    def fits(profile: Profile) -> bool:
        return [bool(device.accelerator) for device in profile.devices] == wanted

    if is_file(str(options.on)):
        place = cluster_place(Cluster.load(Path(options.on)))
        kept = kept_profile(graph, devices, environment=os.environ, place=place, fits=fits)
        if kept is None:
            raise UsageError(
                f"the devices of {options.on} were not measured with this model yet: terrazzo "
                f"cluster profile {options.model} --input {options.input[0]} --on {options.on}"
            )
        return kept
    kept = kept_profile(graph, devices, environment=os.environ, fits=fits)
    asked = str(options.on) if guess is not None else f"{devices} local"
    if kept is not None and kept.key.get(PLACE) == asked:
        return kept
    return guess


def _forecast(graph: Graph, wishes: Wishes, screen: Screen) -> Plan:
    profile = wishes.profile
    assert profile is not None
    devices = len(profile.devices)
    found: Found | None = None
    if wishes.is_open:
        found = wishes.search(graph, devices)
        chosen, prediction = found.best.plan, found.best.prediction
    else:
        chosen = wishes.plan(graph, devices)
        prediction = predict(lower(graph, chosen), wishes.prices(profile))
    show_plan(view(graph, chosen), screen)
    show_forecast(
        graph, chosen, prediction, profile=profile, limits=wishes.limits_bytes(), screen=screen
    )
    if any(group.passes for group in chosen.groups):
        _cost(lower(graph, chosen), wishes.training, screen)
    if found is None:
        found = Found(Tried("as asked for", chosen, prediction), ())
    show_rejected(found, screen)
    show_help(graph, found, wishes=wishes, profile=profile, screen=screen)
    return chosen


def exported(model: nn.Module, inputs: list[TensorSpec]) -> tuple[Graph, Training]:
    """The graph of a model, and what of it is trained."""
    import torch  # takes a while: not for --help

    from terrazzo.graph.export import export, frozen_in, wants_inputs

    generator = torch.Generator()
    drawn = [spec.draw(generator) for spec in inputs]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in drawn)
    trained = Training(frozen=frozen_in(model), inputs=wants_inputs(model, cast))
    return export(model, cast).graph, trained


def show(graph: Graph, plan: Plan, wishes: Wishes, screen: Screen) -> None:
    """Prints the picture, the memory of each device, and what passes cost."""
    show_plan(view(graph, plan), screen)
    program = lower(graph, plan)
    feet = footprints(program, training=wishes.training)
    limit = f", limit {wishes.memory} on each device" if wishes.memory else ""
    screen.title(f"Memory of a training step{limit}")
    for device, foot in enumerate(feet):
        if device and foot == feet[device - 1]:
            continue
        same = sum(other == foot for other in feet)
        who = f"each of {same} devices" if same > 1 else f"device {device}"
        screen.line(f"{who}: {bytes_text(foot.total_bytes)}, most at {foot.where}", "bold")
        screen.line(_parts(foot))
    if any(group.passes for group in plan.groups):
        _cost(program, wishes.training, screen)


def _tell_training(graph: Graph, training: Training, screen: Screen) -> None:
    """What is counted other than usual."""
    every, trained = len(EVERYTHING.weights(graph)), len(training.weights(graph))
    if trained < every:
        screen.line(
            f"Frozen: {every - trained} of {count_text(every, 'parameter')}. Their gradients are "
            "not made, summed or kept.",
            "dim",
        )
    if training.states:
        screen.line(f"Memory counts what {training.optimizer} keeps of trained weights.", "dim")


def _parts(foot: Footprint) -> str:
    states = ""
    if foot.states_bytes:
        states = f", the optimiser's state {bytes_text(foot.states_bytes)}"
    return (
        f"  weights {bytes_text(foot.weights_bytes)}, their gradients "
        f"{bytes_text(foot.weight_gradients_bytes)}{states}, maps {bytes_text(foot.maps_bytes)}, "
        f"their gradients {bytes_text(foot.map_gradients_bytes)}, work space "
        f"{bytes_text(foot.working_bytes)}; the rest is the allocator's and the libraries'"
    )


def _cost(program: Program, training: Training, screen: Screen) -> None:
    """What was saved against keeping everything, and the arithmetic it takes."""
    graph, plan = program.graph, program.plan
    all_kept = plan_graph(graph, plan.devices, layout=plan.groups[0].layout, groups="auto")
    before = needed(graph, all_kept, training=training)
    after = max(footprints(program, training=training), key=lambda foot: foot.total_bytes)
    times = max(work(program, device, training=training).times for device in range(plan.devices))
    share = after.total_bytes / before.total_bytes
    passes = max(group.passes for group in plan.groups)
    screen.line(
        f"With passes ({count_text(len(plan.groups), 'group')}, up to {passes} strips each): "
        f"{share:.2f} of the {bytes_text(before.total_bytes)} that keeping everything takes, for "
        f"{times:.2f} times the arithmetic."
    )

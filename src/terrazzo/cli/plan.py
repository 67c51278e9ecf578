"""``terrazzo plan``: how a model would be cut, and what a step would need; nothing is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.model import ModelReference, add_model
from terrazzo.cli.tensor import TensorSpec
from terrazzo.cluster import LocalHosts
from terrazzo.planner import Wishes, plan_graph
from terrazzo.planner.fitting import needed
from terrazzo.records import Graph, Plan
from terrazzo.records.units import bytes_text, count_text
from terrazzo.report.planview import view
from terrazzo.report.screen import Screen
from terrazzo.report.terminal import show_plan
from terrazzo.schedule import Program, lower
from terrazzo.schedule.ledger import Footprint
from terrazzo.schedule.memory import footprint
from terrazzo.schedule.work import work

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo plan net.py:build --input 8x3x224x224 --on 4
      how four devices would share one model, and what each needs
  terrazzo plan terrazzo.zoo.unet:unet --input 1x3x1024x1024 --memory 950MiB
      one device with little memory: what is kept, what is computed again, and what that costs
  terrazzo plan net.py:build --input 8x3x224x224 --on 4 --groups one --save plan.json
      keep a plan; tz.Plan.load reads it, tz.parallelize(model, (x,), plan) obeys it

Nothing is trained and no device needs to be there. Memory is what a training step takes on top of
the idle process (about 220 MiB with torch loaded) and of the optimiser's state (as much as the
weights for momentum, twice for Adam).
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="show how a model would be cut, and what a step would need",
        description="Show how a model would be cut over devices, what a training step would need "
        "in memory, and what fitting it into less would cost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument(
        "--on", default="1", metavar="N", help="how many devices (default: %(default)s)"
    )
    parser.add_argument("--layout", default="auto", help="tiles:ROWSxCOLS, whole, or auto")
    parser.add_argument(
        "--groups", default="auto", help="each, one, a number, or layers that end groups: a,b,c"
    )
    parser.add_argument(
        "--passes", type=int, default=0, help="strips per group, computed again in backward"
    )
    parser.add_argument("--memory", help="most that a step may take on a device: 700MiB, 1.5GiB")
    parser.add_argument("--eval", action="store_true", help="evaluation mode, not training")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.set_defaults(command=plan)


def plan(options: argparse.Namespace) -> int:
    devices = LocalHosts.parse(options.on).devices
    wishes = Wishes(options.layout, options.groups, options.passes, options.memory)
    reference = ModelReference.parse(options.model)
    inputs = [TensorSpec.parse(text) for text in options.input]
    graph = exported(reference, inputs, training=not options.eval)
    chosen = wishes.plan(graph, devices)
    show(graph, chosen, limit=options.memory or "")
    if options.save:
        chosen.save(options.save)
        print(f"saved as {options.save}")
    return 0


def exported(reference: ModelReference, inputs: list[TensorSpec], *, training: bool) -> Graph:
    import torch  # takes a while: not for --help

    from terrazzo.graph.export import export

    model, generator = reference.build().train(training), torch.Generator()
    drawn = [spec.draw(generator) for spec in inputs]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return export(model, tuple(x.to(dtype) if x.is_floating_point() else x for x in drawn)).graph


def show(graph: Graph, plan: Plan, *, limit: str = "") -> None:
    """Prints the picture, the memory of each device, and what passes cost."""
    screen = Screen()
    show_plan(view(graph, plan), screen)
    program = lower(graph, plan)
    feet = [footprint(program, device) for device in range(plan.devices)]
    screen.title("Memory of a training step" + (f", limit {limit} on each device" if limit else ""))
    for device, foot in enumerate(feet):
        if device and foot == feet[device - 1]:
            continue
        same = sum(other == foot for other in feet)
        who = f"each of {same} devices" if same > 1 else f"device {device}"
        screen.line(f"{who}: {bytes_text(foot.total_bytes)}, most at {foot.where}", "bold")
        screen.line(_parts(foot))
    if any(group.passes for group in plan.groups):
        _cost(graph, program, feet, screen)


def _parts(foot: Footprint) -> str:
    return (
        f"  weights {bytes_text(foot.weights_bytes)}, their gradients "
        f"{bytes_text(foot.weight_gradients_bytes)}, maps {bytes_text(foot.maps_bytes)}, their "
        f"gradients {bytes_text(foot.map_gradients_bytes)}, work space "
        f"{bytes_text(foot.working_bytes)}, a tenth on top for the allocator"
    )


def _cost(graph: Graph, program: Program, feet: list[Footprint], screen: Screen) -> None:
    """What was saved against keeping everything, and the arithmetic it takes."""
    plan = program.plan
    layout = plan.groups[0].layout
    before = needed(graph, plan_graph(graph, plan.devices, layout=layout, groups="auto"))
    after = max(feet, key=lambda foot: foot.total_bytes)
    times = max(work(program, device).times for device in range(plan.devices))
    share = after.total_bytes / before.total_bytes
    passes = max(group.passes for group in plan.groups)
    screen.line(
        f"With passes ({count_text(len(plan.groups), 'group')}, up to {passes} strips each): "
        f"{share:.2f} of the {bytes_text(before.total_bytes)} that keeping everything takes, for "
        f"{times:.2f} times the arithmetic."
    )

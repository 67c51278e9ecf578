"""What trains on devices of 512 MiB: U-Net at 1024x1024, one image, on one device, by DDP, on four.

python tools/small_devices.py [--memory 512MiB] [--size 1024]

As root: every device is a control group with a hard limit. The plan is the planner's own, by the
figures of such devices. They compute in vectors as wide as boards do, which decides what is made on
the way; beyond that computing and links run at full speed, neither changes what a step holds.
DDP gives each device whole images, so it gets four of them.
Gradients of the four devices and of plain PyTorch in float32, without a limit, are held against
plain PyTorch in float64.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from terrazzo.bench import gradients
from terrazzo.bench.cases import Case
from terrazzo.bench.seats import Seats
from terrazzo.bench.task import Task, WithLoss, gradients_of, loss_of
from terrazzo.bench.turn import Job, Turn, gradient_file, take_turn
from terrazzo.graph.export import export
from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.preset import LinkSpeed, Preset
from terrazzo.lab.topology import Topology
from terrazzo.planner import Wishes
from terrazzo.planner.guess import Figures, guessed
from terrazzo.records.units import bytes_text, parse_bytes

MODEL, DEVICES = "unet32", 4
FAST_BITS_PER_S = 10e9
FLOPS_PER_S, BITS_PER_S = 20e9, 940e6
"""What the plan is made for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="512MiB", help="of a device")
    parser.add_argument("--size", type=int, default=1024)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(LabHosts.open(_devices(parse_bytes(options.memory))))
        for peer, devices, batch in (("alone", 1, 1), ("ddp", DEVICES, DEVICES)):
            case = Case.of(MODEL, on=str(devices), batch=batch, side=options.size)
            turn = take_turn(_job(case, peer, folder / peer), Seats(hosts, range(devices)))
            _tell(f"{peer}, batch {batch}, devices: {devices}", turn)
        case = Case.of(MODEL, on=str(DEVICES), batch=1, side=options.size)
        _plan(case, parse_bytes(options.memory), folder / "plan.json")
        job = _job(case, f"plan {folder / 'plan.json'}", folder / "plan")
        _tell(
            f"the plan, batch 1, devices: {DEVICES}", take_turn(job, Seats(hosts, range(DEVICES)))
        )
        if gradient_file(job, 0).exists():
            _compare(case, gradient_file(job, 0))


def _devices(limit_bytes: int) -> Topology:
    board = Preset(
        name="small",
        flops_per_s=1e9,
        threads=1,
        memory_bytes=limit_bytes,
        wire=LinkSpeed(FAST_BITS_PER_S),
        wifi=None,
        vector_bits=128,
    )
    return Topology.parse(f"{DEVICES}xsmall", {"small": board})


def _job(case: Case, peer: str, folder: Path) -> Job:
    return Job(
        case=case,
        peer=peer,
        workers=int(case.on),
        folder=folder,
        seconds=1.0,
        patience_s=1.0,
        limit_s=900.0,
        keep_gradients=True,
    )


def _plan(case: Case, limit_bytes: int, path: Path) -> None:
    task = Task.make(case)
    graph = export(WithLoss(task.model), (task.images,)).graph
    board = Figures("small", FLOPS_PER_S, limit_bytes, BITS_PER_S / 8)
    found = Wishes(profile=guessed([board] * DEVICES)).search(graph, DEVICES).best
    needs = ", ".join(map(bytes_text, found.prediction.memory_bytes))
    print(f"plan: {found.name}; predicted beside the idle process: {needs}", flush=True)
    found.plan.save(path)


def _tell(what: str, turn: Turn) -> None:
    if turn.problem:
        print(f"{what}: {turn.problem}", flush=True)
        return
    idle, peak = (", ".join(map(bytes_text, s)) for s in (turn.idle_bytes, turn.best.peak_bytes))
    print(f"{what}: idle {idle}; peak {peak}; three steps made", flush=True)


def _compare(case: Case, path: Path) -> None:
    single = Task.make(case)
    double = Task(copy.deepcopy(single.model).double(), single.images.double())
    for task in (single, double):
        torch.autograd.backward(loss_of(task.model(task.images)))
    exact = gradients_of(double.model)
    for what, found in (
        ("plain float32", gradients_of(single.model)),
        ("four devices", torch.load(path)),
    ):
        print(f"{what}: {gradients.worst_gap(found, exact):.2e} from float64", flush=True)


if __name__ == "__main__":
    main()

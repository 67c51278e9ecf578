"""``terrazzo check``: does a model give the same numbers on several devices as on one?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from terrazzo.cli.check_job import CheckJob
from terrazzo.cli.model import ModelReference, add_model
from terrazzo.cli.place import Place, add_lab_flags
from terrazzo.cli.tensor import TensorSpec
from terrazzo.cluster import Hosts, LaunchResult, launch
from terrazzo.cluster.printer import Printer
from terrazzo.errors import TerrazzoError, UsageError
from terrazzo.records.check import CheckReport
from terrazzo.records.layout import Layout

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo check net.py:build --input 2x3x224x224 --on 3
      compare outputs, gradients and buffers of build() on three devices with one device
  terrazzo check resnet18 --input 2x3x97x131 --on 4 --layout tiles:2x2 --eval
      a model of a package, odd sizes, a named layout, evaluation mode
  terrazzo check net.py:Siamese --input 2x3x64x64 --input 2x16:int64 --on 2 --groups one
      two inputs, the second of integers; everything fused into one group

MODEL is called without arguments; an nn.Module instance is taken as it is. The comparison is made
in float64, on random inputs. The share that ran split says how much of the work the devices really
divided: what mixes all positions, such as attention, runs whole on each.

Exit status: 0 exact, 1 not exact, 2 the check could not be made.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="compare a model on several devices with one device",
        description="Check that a model gives the same numbers on several devices as on one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument(
        "--on", required=True, metavar="N", help="devices: 4 processes here, or 6xpi3 emulated"
    )
    parser.add_argument(
        "--layout", help="tiles:ROWSxCOLS, uneven such as tiles:3,2,1x1, or whole (default: chosen)"
    )
    parser.add_argument(
        "--groups", help="each, one, a number of groups, or names of layers that end them: a,b,c"
    )
    parser.add_argument("--eval", action="store_true", help="check evaluation mode, not training")
    parser.add_argument(
        "--seed", type=int, default=0, help="for weights and inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-10,
        help="largest relative error that counts as exact (default: %(default)g)",
    )
    add_lab_flags(parser)
    parser.set_defaults(command=check)


def check(options: argparse.Namespace) -> int:
    place = Place.read(options)
    job = _job(options, devices=place.devices)
    try:
        with place.open() as hosts:
            report = _made(job, hosts)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("; nothing was compared, no device is left running") from None
    show(report, job=job)
    return 0 if report.ok else 1


def _made(job: CheckJob, hosts: Hosts) -> CheckReport:
    with tempfile.TemporaryDirectory(prefix="terrazzo-check-") as folder:
        desk = Path(folder)
        job.write(desk)
        command = [sys.executable, "-m", "terrazzo.cli.check_worker", folder]
        printer = Printer(hosts.names, out=sys.stderr)  # stdout is for the result alone
        result = launch(command, hosts, output=printer.line)
        return _report(desk, result)


def _job(options: argparse.Namespace, *, devices: int) -> CheckJob:
    """Everything that can be refused before a process is started."""
    reference = ModelReference.parse(options.model)
    inputs = tuple(TensorSpec.parse(text) for text in options.input)
    if options.layout is not None and options.layout != "auto":
        layout = Layout.parse(options.layout)
        if not layout.is_whole and layout.devices != devices:
            raise UsageError(
                f"--layout {options.layout} is for {layout.devices} devices, --on says {devices}; "
                "make them agree"
            )
    if not options.tolerance > 0:
        raise UsageError(f"--tolerance {options.tolerance:g} must be above 0, such as 1e-10")
    return CheckJob(
        model=str(reference),
        inputs=tuple(map(str, inputs)),
        layout=options.layout,
        groups=options.groups,
        training=not options.eval,
        seed=options.seed,
        tolerance=options.tolerance,
    )


def _report(desk: Path, result: LaunchResult) -> CheckReport:
    if result.failure is not None:
        message = CheckJob.error_path(desk, result.failure.device)
        if message.exists():
            raise TerrazzoError(message.read_text(encoding="utf-8"))
        raise TerrazzoError(f"the check did not finish: {result.failure}")
    return CheckReport.from_json(CheckJob.report_path(desk).read_text(encoding="utf-8"))


def show(report: CheckReport, *, job: CheckJob) -> None:
    """Prints the plan, one row per family of tensors, and the verdict."""
    console = Console(highlight=False)
    if report.plan_text:
        console.print(Text(report.plan_text.rstrip(), style="dim"), soft_wrap=True)
        console.print()
    mode = "training" if job.training else "evaluation"
    title = f"{job.model} in {mode}: {report.devices} devices against one"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("compared", no_wrap=True)
    for heading in ("tensors", "worst", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at", overflow="fold")
    table.add_column("", no_wrap=True)
    for row in report.rows:
        verdict = Text("exact", style="green") if row.ok else Text("WRONG", style="bold red")
        numbers = (str(row.count), f"{row.worst:.1e}", f"{row.tolerance:.0e}")
        table.add_row(Text(row.what), *numbers, Text(row.where), verdict)
    console.print(table)
    console.print(
        f"before the first global pool {report.split_flops:.1%} of FLOPs and "
        f"{report.split_bytes:.1%} of activation bytes ran split",
        soft_wrap=True,
    )
    if report.ok:
        console.print(f"exact on {report.devices} devices", style="bold green")
    else:
        wrong = ", ".join(row.what for row in report.rows if not row.ok)
        console.print(f"NOT exact on {report.devices} devices: {wrong}", style="bold red")

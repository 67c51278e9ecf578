"""``terrazzo demo``: a detector trained on several devices and on one, side by side."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.recording import launch_recorded
from terrazzo.cli.report import save
from terrazzo.cluster import LocalHosts
from terrazzo.cluster.hosts import available_cores
from terrazzo.demo.comparison import compare_weights
from terrazzo.demo.job import DemoJob
from terrazzo.demo.progress import TrainingProgress
from terrazzo.errors import RunError, UsageError
from terrazzo.records import document
from terrazzo.records.run import RunFolder
from terrazzo.records.units import count_text, seconds_text
from terrazzo.report.page import page
from terrazzo.report.reading import ALONE, Reading
from terrazzo.report.screen import Screen
from terrazzo.report.summary import summary_json
from terrazzo.report.terminal import show

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

STRIDE = 16
STEPS, SIZE, BATCH, PICTURES = 80, 128, 8, 24
"""Two minutes on two cores: enough to learn these few pictures by heart, not more."""
EXAMPLES = """\
examples:
  terrazzo demo
      train on four devices and on one, compare, and write a report: about two minutes
  terrazzo demo --on 2 --steps 10
      on two devices, only ten steps

Everything is kept in a new folder under runs/. Exit status: 0 the numbers agree, 1 they do not, 2
the demo could not be run.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small detector on four devices and on one, and compare",
        description="Train the same detector on several local devices and on one, and show that "
        "they give the same numbers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--on", default="4", metavar="N", help="local devices (default: 4)")
    for flag, default, what in (
        ("--steps", STEPS, "training steps"),
        ("--size", SIZE, f"side of a picture, a multiple of {STRIDE}"),
        ("--batch", BATCH, "pictures per step"),
        ("--seed", 0, "of weights and pictures"),
    ):
        words = f"{what} (default: {default})"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=words)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR",
        help="where the folder of this run is made (default: runs)",
    )  # fmt: skip
    where.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the folder of this run itself: new or empty"
    )
    parser.set_defaults(command=demo)


def demo(options: argparse.Namespace) -> int:
    hosts = LocalHosts.parse(options.on)
    job = _job(options)
    begin_s = time.monotonic()
    screen = Screen()
    folder = (
        RunFolder.take(options.run_dir) if options.run_dir
        else RunFolder.create(options.runs, "demo")
    )  # fmt: skip
    screen.line(
        f"A detector on {job.size}x{job.size} pictures, in float64: {count_text(job.steps, 'step')}"
        f" on {count_text(hosts.devices, 'device')}, then on one. Ctrl-C ends it."
    )
    try:
        _train_both(job, folder, hosts.devices, screen)
        ok = _shown(folder, screen)
    except KeyboardInterrupt:
        words = f"; no device is left running, what was recorded so far is in {folder.path}"
        raise KeyboardInterrupt(words) from None
    screen.line()
    screen.line(f"The whole demo took {seconds_text(time.monotonic() - begin_s)}. Look closer:")
    screen.raw(f"  {folder.file('report.html')}")
    screen.raw(f"  terrazzo report {folder.path} --trace trace.json")
    return 0 if ok else 1


def _shown(folder: RunFolder, screen: Screen) -> bool:
    """Compares both trainings, writes and prints the report; whether the weights agree."""
    weights = [path / "weights.safetensors" for path in (folder.path, folder.file(ALONE))]
    comparison = compare_weights(*weights)
    document.write(folder.file("comparison.json"), comparison.to_json() + "\n")
    reading = Reading.open(folder.path)
    save(folder.file("summary.json"), summary_json(reading) + "\n")
    save(folder.file("report.html"), page(reading))
    screen.line()
    show(reading, screen)
    return comparison.ok


def _job(options: argparse.Namespace) -> DemoJob:
    """Everything that can be refused before a process is started."""
    for flag in ("steps", "batch"):
        if getattr(options, flag) < 1:
            raise UsageError(f"--{flag} {getattr(options, flag)} is too few; give at least 1")
    if options.size % STRIDE or options.size < 2 * STRIDE:
        raise UsageError(
            f"--size {options.size} does not fit the network: give a multiple of {STRIDE} from "
            f"{2 * STRIDE} on"
        )
    if find_spec("PIL") is None:
        raise UsageError(
            "the demo keeps pictures on disk, for which it needs Pillow: pip install "
            "'terrazzo[data]'"
        )
    return DemoJob(
        steps=options.steps,
        size=options.size,
        batch=options.batch,
        pictures=max(PICTURES, options.batch),
        seed=options.seed,
        learning_rate=5e-3,
    )


def _train_both(job: DemoJob, folder: RunFolder, devices: int, screen: Screen) -> None:
    job.write(folder.path)
    alone = RunFolder(folder.file(ALONE))
    alone.path.mkdir()
    # One device alone is one of these devices: the same number of threads.
    env = {"OMP_NUM_THREADS": str(max(1, available_cores() // devices))}
    typed = ["terrazzo", "demo", "--on", str(devices), "--steps", str(job.steps)]
    typed += ["--size", str(job.size), "--batch", str(job.batch), "--seed", str(job.seed)]
    with TrainingProgress(screen, steps=job.steps) as progress:
        for place, count, title in (
            (folder, devices, count_text(devices, "device")),
            (alone, 1, "one device"),
        ):
            paths = [str(folder.path), str(place.path)]
            result = launch_recorded(
                [sys.executable, "-m", "terrazzo.demo.training", *paths],
                count,
                folder=place,
                name="demo",
                typed=typed,
                env=env,
                output=progress.training(title),
            )
            if result.failure is not None:
                raise RunError(f"the training on {title} failed: {result.failure}")
            if not result.ok:
                raise RunError(f"the training on {title} ended with {result.statuses}")

"""``terrazzo cluster setup``: an environment on each device with what a training needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.inspect import DEFAULT
from terrazzo.cli.place import say
from terrazzo.cli.verb import add_verb
from terrazzo.cluster import launch
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.records.cluster import Cluster
from terrazzo.records.machine import Machine

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo cluster setup --on cluster.toml
      torch of this machine's version on every device, from the index that pip uses there
  terrazzo cluster setup --on cluster.toml --torch 2.9.1
      another version, such as one that has CPU builds for Arm boards (docs/install.md)

Makes an environment in the device's work folder with the Python that the file names, and prints the
line to write into the file. Options for pip, such as another index: pip = ["--index-url", "..."].
Terrazzo itself is not installed: terrazzo run brings its own.
"""
PACKAGES = ("numpy>=1.26", "rich>=13.7", "safetensors>=0.4.3")
ENVIRONMENT = "env"
SCRIPT = """
import os, pathlib, subprocess, sys, venv
place = pathlib.Path(os.environ["TERRAZZO_PLACE"])
python = place / "bin" / "python"
if not python.exists():
    print("making an environment in", place, flush=True)
    venv.EnvBuilder(with_pip=True).create(place)
command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *sys.argv[1:]]
print("installing", *sys.argv[1:], flush=True)
sys.exit(subprocess.run(command).returncode)
"""


def add_setup(below: Commands) -> None:
    parser = add_verb(below, "setup", "make an environment on each device", EXAMPLES)
    parser.add_argument(
        "--on", type=Path, default=DEFAULT, metavar="FILE",
        help="the cluster's file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--torch", metavar="VERSION", help="(default: as on this machine)")
    parser.set_defaults(command=setup)


def setup(options: argparse.Namespace) -> int:
    cluster = Cluster.load(options.on)
    torch = options.torch or Machine.here().torch.partition("+")[0]
    with SshHosts.open(cluster, folder=options.on.parent, ready=False) as hosts:
        places = [f"{fact.workdir}/{ENVIRONMENT}" for fact in hosts.facts]
        variables = [{"TERRAZZO_PLACE": place} for place in places]
        words = [*cluster.pip, f"torch=={torch}", *PACKAGES]
        command = [sys.executable, "-c", SCRIPT, *words]
        result = launch(command, hosts, per_device_env=variables)
    if result.failure:
        print(f"terrazzo: error: {result.failure}", file=sys.stderr)
        return 1
    for device, place in zip(cluster.devices, places, strict=True):
        say(f'{device.name} is set up; write for it: python = "{place}/bin/python"')
    return 0

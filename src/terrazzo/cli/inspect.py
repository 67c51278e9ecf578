"""``terrazzo cluster check``: can these devices be used as they are, and what to put right."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from terrazzo.cli.verb import add_verb
from terrazzo.cluster.connections import connected
from terrazzo.cluster.inspection import Facts, Finding, findings
from terrazzo.cluster.reach import try_connections
from terrazzo.errors import HostError
from terrazzo.records.cluster import Cluster
from terrazzo.records.units import bytes_text, count_text, seconds_text
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT = Path("cluster.toml")
EXAMPLES = """\
examples:
  terrazzo cluster check
      the devices of cluster.toml in this folder
  terrazzo cluster check --on boards.toml

Connects to all devices over SSH, looks at Python, torch, clocks, addresses, memory and disks, and
lets every device try to reach every other. Exit status: 0 ready, 1 something must be put right, 2
the file makes no sense.
"""


def add_check(below: Commands) -> None:
    parser = add_verb(below, "check", "whether real devices are ready, and what to fix", EXAMPLES)
    parser.add_argument(
        "--on", type=Path, default=DEFAULT, metavar="FILE",
        help="the cluster's file (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(command=check)


def check(options: argparse.Namespace) -> int:
    cluster, screen = Cluster.load(options.on), Screen()
    with connected(cluster, folder=options.on.parent) as (connections, facts):
        reached = [number for number, fact in enumerate(facts) if isinstance(fact, Facts)]
        known = [fact for fact in facts if isinstance(fact, Facts)]
        part = Cluster(
            tuple(cluster.devices[number] for number in reached), encrypt=cluster.encrypt
        )
        found = findings(part, known) if known else []
        if len(known) > 1:
            open_ones = [connection.ssh for connection in connections if connection is not None]
            found += try_connections(open_ones, known)
    _table(cluster, facts, screen)
    lost = [fact for fact in facts if isinstance(fact, HostError)]
    return _verdict(lost, found, len(cluster.devices), screen)


def _table(cluster: Cluster, facts: Sequence[Facts | HostError], screen: Screen) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("device", "address", "software", "cores", "free", "clock"):
        table.add_column(heading, overflow="fold")
    for device, fact in zip(cluster.devices, facts, strict=True):
        if isinstance(fact, HostError):
            table.add_row(device.name, Text("not reached", style="bold red"))
            continue
        table.add_row(
            device.name,
            f"{fact.address(device)}\n{fact.interface(device)}",
            f"Python {fact.python}\ntorch {fact.versions.get('torch') or 'none'}",
            str(fact.cores),
            f"{bytes_text(fact.available_bytes)} memory\n{bytes_text(fact.free_bytes)} disk",
            _clock(fact),
        )
    screen.console.print(table)


def _clock(fact: Facts) -> str:
    if abs(fact.clock_s) <= fact.clock_error_s:
        return "same"
    return f"{'+' if fact.clock_s > 0 else '-'}{seconds_text(abs(fact.clock_s))}"


def _verdict(
    lost: Sequence[HostError], found: Sequence[Finding], devices: int, screen: Screen
) -> int:
    wrong = [finding for finding in found if finding.fatal]
    for error in lost:
        screen.line(f"fix: {error}", "bold red")
    for finding in wrong:
        screen.line(f"fix: {finding}", "bold red")
    for finding in found:
        if not finding.fatal:
            screen.line(f"better: {finding}", "yellow")
    if lost or wrong:
        screen.line(f"not ready: {count_text(len(lost) + len(wrong), 'thing')} to fix", "bold red")
        return 1
    screen.line(f"{count_text(devices, 'device')} ready", "bold green")
    return 0

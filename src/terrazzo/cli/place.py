"""Where devices live, as ``--on`` and its companions say: processes here, emulated, or real."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from terrazzo.cluster.hosts import Hosts, LocalHosts
from terrazzo.cluster.sshhosts import SshHosts
from terrazzo.errors import UsageError
from terrazzo.lab.hosts import LabHosts, is_root
from terrazzo.lab.preset import load_presets
from terrazzo.lab.start import started, unshaped
from terrazzo.lab.topology import REPLACES, Topology, is_description
from terrazzo.records.cluster import Cluster


def add_lab_flags(parser: argparse.ArgumentParser) -> None:
    """The companions of ``--on 6xpi3``."""
    lab = parser.add_argument_group("emulated devices (--on 6xpi3; see terrazzo lab --help)")
    add_presets_flag(lab)
    lab.add_argument(
        "--unshaped", action="store_true", help="as plain local processes: nothing is emulated"
    )
    lab.add_argument(
        "--no-verify", action="store_true", help="start also where the lab is not as fast as asked"
    )
    lab.add_argument("--slow-storage", action="store_true", help="slow the disk of this folder too")


def add_presets_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--presets", type=Path, action="append", default=[], metavar="FILE",
        help="more kinds of devices, as TOML (terrazzo-presets.toml here is always read)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """What ``--on`` names, before anything is made."""

    local: LocalHosts | None
    topology: Topology | None
    unshaped: bool = False
    verify: bool = True
    slow_storage: bool = False
    threads: int = 0
    """Of an emulated device; 0: as many as its share of this machine has cores."""
    cluster: Cluster | None = None
    path: Path = Path()
    """Of the file that describes the cluster."""

    @classmethod
    def read(cls, options: argparse.Namespace, *, real: bool = False) -> Place:
        """``real``: whether the command can use devices that a file describes."""
        text = str(options.on)
        if text.isascii() and text.isdigit() and int(text) > 0:
            return cls(LocalHosts(int(text)), None)
        if is_file(text):
            if not real:
                raise UsageError(f"--on {text}: this command runs on this machine only; {REPLACES}")
            return cls(None, None, cluster=Cluster.load(Path(text)), path=Path(text))
        return cls(
            None,
            read_topology(text, options.presets),
            unshaped=options.unshaped,
            verify=not options.no_verify,
            slow_storage=options.slow_storage,
        )

    @property
    def devices(self) -> int:
        if self.cluster is not None:
            return len(self.cluster.devices)
        return self.local.devices if self.local else len(self._asked.devices)

    @property
    def _asked(self) -> Topology:
        assert self.topology is not None
        return self.topology

    @contextmanager
    def open(self) -> Iterator[Hosts]:
        """The hosts, for as long as the block runs."""
        if self.local is not None:
            yield self.local
        elif self.cluster is not None:
            say(f"connecting to {', '.join(self.cluster.names)}")
            with SshHosts.open(self.cluster, folder=self.path.parent) as reached:
                yield reached
        elif self.unshaped or not is_root():
            reason = "--unshaped" if self.unshaped else "without root (use sudo to emulate)"
            say(unshaped(self._asked, reason))
            yield LocalHosts(self.devices)
        else:
            storage = Path() if self.slow_storage else None
            say(f"starting lab {self._asked.description}: measuring this machine, a few seconds")
            with started(
                self._asked, say=say, check=self.verify, storage=storage, threads=self.threads
            ) as hosts:
                yield hosts


def is_file(text: str) -> bool:
    """Whether ``--on`` names a cluster's file: there, or by its ending meant to be."""
    return text.endswith(".toml") or ("/" in text and Path(text).is_file())


def cluster_place(cluster: Cluster) -> str:
    """What a profile says of devices that a file describes: which they are, wherever it lies."""
    return "cluster " + ", ".join(f"{device.name}={device.host}" for device in cluster.devices)


def place_text(hosts: Hosts | int, on: str) -> str:
    """What a profile of these devices says of where they are."""
    if isinstance(hosts, SshHosts):
        return cluster_place(hosts.cluster)
    if isinstance(hosts, LabHosts):
        return on
    return f"{hosts if isinstance(hosts, int) else len(hosts.names)} local"


def read_topology(text: str, presets: list[Path]) -> Topology:
    """The emulated cluster that a text describes."""
    if not is_description(text):
        raise UsageError(f"--on {text} is not understood; {REPLACES}")
    return Topology.parse(text, load_presets(presets))


def say(text: str) -> None:
    print(f"terrazzo: {text}", file=sys.stderr)

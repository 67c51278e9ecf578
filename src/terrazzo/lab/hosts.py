"""LabHosts: emulated devices as hosts that training can't tell from real ones.

with LabHosts.open(Topology.parse("6xpi3", load_presets())) as hosts:
    calibrate(hosts)                       # quotas from what this machine measures
    launch([sys.executable, "train.py"], hosts)
    hosts.usage(0).peak_bytes
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from terrazzo.cluster.hosts import FOREIGN_PREFIXES, available_cores, copy_here, rendezvous
from terrazzo.cluster.process import DeviceProcess
from terrazzo.errors import LabError
from terrazzo.lab import state, vectors
from terrazzo.lab.clean import remove_dead, remove_lab
from terrazzo.lab.groups import find_groups
from terrazzo.lab.network import CABLE, Network
from terrazzo.lab.quota import CpuQuota, require_fit, require_memory, threads_of
from terrazzo.lab.running import RunningLab
from terrazzo.lab.state import LabState
from terrazzo.lab.topology import Topology
from terrazzo.lab.trees import Trees
from terrazzo.records import document
from terrazzo.records.power import IDLE_PART, POWER, emulation

KNOBS = "TERRAZZO_KNOBS"
"""Names the folder in which a device's knobs are; the same name as in seating."""
ENTER = Path(__file__).with_name("enter.py")
FAST_BITS_PER_S = 10e9
PORT = 29500
"""Nobody else lives in the first device's namespace: any port is free."""
IN_ORDER = b"."
"""What the janitor reads when a lab was closed, and not just left."""


class LabHosts(RunningLab):
    """The devices of a lab that this process made; ``open`` makes it and removes it again."""

    def __init__(self, lab: RunningLab, *, folder: Path) -> None:
        super().__init__(lab.name, topology=lab.topology, network=lab.network, groups=lab.groups)
        self.folder = folder
        self.shares: tuple[float, ...] = ()
        """Cores that each device may use; none before the lab was calibrated."""
        self.run_folder = ""
        self.trees = Trees(Path(os.devnull))
        self.given_threads = 0
        """Of each device, where asked for; 0: as many as its share of this machine has cores."""

    @classmethod
    @contextmanager
    def open(cls, topology: Topology, *, folder: Path = state.FOLDER) -> Iterator[LabHosts]:
        """Makes the devices, with no limit on computing until ``throttle`` sets one."""
        require_root()
        with state.alone(folder):
            groups = find_groups()
            remove_dead(groups, folder)
            limits = [device.memory_bytes for device in topology.devices]
            require_memory(limits, free_bytes=_free_bytes(), what=topology.description)
            hosts = cls._make(topology, folder)
        janitor = _start_janitor(folder)
        try:
            with Trees.made([device.board for device in topology.devices]) as hosts.trees:
                yield hosts
        finally:
            try:
                hosts.close()
            finally:
                janitor.communicate(IN_ORDER)

    @classmethod
    def _make(cls, topology: Topology, folder: Path) -> LabHosts:
        groups, name = find_groups(), state.new_name()
        network = Network.make(topology)
        lab = RunningLab(name, topology=topology, network=network, groups=groups)
        hosts = cls(lab, folder=folder)
        try:
            hosts._tell()  # first: from now on a dead lab can be found
            _write_hosts(topology, state.hosts_file(name, folder))
            groups.make(name, topology.names)
            for index, device in enumerate(topology.devices):
                hosts.group(index).limit_memory(device.memory_bytes)
        except BaseException:
            hosts.close()
            raise
        return hosts

    def close(self) -> None:
        """Ends all devices and removes what was made for them."""
        try:
            remove_lab(self.name, self.groups, self.folder)
        finally:
            self.network.close()

    # ---- computing --------------------------------------------------------------------------

    def throttle(self, shares: Sequence[float]) -> None:
        """Limits each device to its share of cores; refused if this machine has not enough."""
        with state.alone(self.folder):
            others = (other for other in state.states(self.folder) if other.lab != self.name)
            held, what = sum(other.cores for other in others), self.topology.description
            require_fit(shares, cores=available_cores(), held=held, what=what)
            self.shares = tuple(shares)
            self._tell()
        self._limit()

    @contextmanager
    def full_speed(self, *, links: bool = False) -> Iterator[None]:
        """Lifts the limits on computing for a while: for starting up, not for measuring.

        With ``links`` also those of cables; the air of Wi-Fi stays as slow as it is.
        """
        for device in range(len(self.names)):
            self.group(device).limit_cpu(None)
            if links:
                self.network.slow(device, FAST_BITS_PER_S)
        try:
            yield
        finally:
            for device, wanted in enumerate(self.topology.devices):
                if links:
                    self.network.slow(device, wanted.link.bits_per_s)
            self._limit()

    @contextmanager
    def slowed(self, part: float) -> Iterator[None]:
        """Gives devices only a part of their shares for a while: one of their cores, say."""
        before, self.shares = self.shares, tuple(share * part for share in self.shares)
        self._limit()
        try:
            yield
        finally:
            self.shares = before
            self._limit()

    def _limit(self) -> None:
        for device, share in enumerate(self.shares):
            self.group(device).limit_cpu(CpuQuota.of(share))

    def use_threads(self, count: int) -> None:
        """That many in each device, on as many cores of this machine; its rate stays the same."""
        if count > available_cores():
            raise LabError(
                f"{count} threads a device need {count} cores to run at once, this machine has "
                f"{available_cores()}: ask for fewer with --threads"
            )
        self.given_threads = count

    def slow_storage(self, path: Path) -> str:
        """Limits the disk that holds ``path`` for each device; what came of it, in words."""
        if not self.groups.can_limit_storage:
            return "storage is not slowed: this kernel offers no blkio or io controller"
        disk = disk_of(path)
        if disk is None:
            return f"storage is not slowed: {path} is on no disk of this machine's own"
        for index, device in enumerate(self.topology.devices):
            if device.storage is not None:
                self.group(index).limit_storage(
                    disk,
                    read_bytes_per_s=round(device.storage.read_bytes_per_s),
                    write_bytes_per_s=round(device.storage.write_bytes_per_s),
                )
        return f"storage is slowed on disk {disk}, for what the page cache does not hold"

    def note_run(self, folder: Path) -> None:
        """Where the devices record: faults can wait for a step there, and reports find the lab."""
        self.run_folder = str(folder.resolve())
        document.write(folder / "lab.json", self.topology.to_json() + "\n")
        self._tell()

    # ---- the interface of hosts -------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return self.topology.names

    def address(self, device: int) -> str:
        return self.topology.devices[device].address

    def port(self) -> AbstractContextManager[int]:
        return nullcontext(PORT)

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        own = {key: value for key, value in base.items() if not key.startswith(FOREIGN_PREFIXES)}
        own.setdefault("OMP_NUM_THREADS", str(self.threads(device)))
        if self.given_threads:  # a thread that waits would use up what others compute with
            own.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        own.setdefault("PYTHONUNBUFFERED", "1")
        own["GLOO_SOCKET_IFNAME"] = CABLE
        if own.get(POWER) != "off":
            own[POWER] = self._power(device)
        own[KNOBS] = str(self.trees.root(device))
        width = vectors.environment(self.topology.devices[device].vector_bits)
        return {**width, **own} | rendezvous(device, len(self.names), at=(self.address(0), port))

    def _power(self, device: int) -> str:
        """This machine's meters know nothing of the board: its preset's watts are told instead."""
        watts = self.topology.devices[device].watts
        if watts is None:
            return "off"
        share = self.shares[device] if self.shares else 1.0
        return emulation(IDLE_PART * watts, (1 - IDLE_PART) * watts / share)

    def threads(self, device: int) -> int:
        if self.given_threads:
            return self.given_threads
        share = self.shares[device] if self.shares else 1.0
        return threads_of(share, self.topology.devices[device].threads)

    def run(
        self, command: Sequence[str], *, device: int, environment: Mapping[str, str]
    ) -> DeviceProcess:
        inside = [sys.executable, "-I", "-S", str(ENTER), *self.place(device), "--", *command]
        name = self.names[device]
        return DeviceProcess(inside, device=device, name=name, environment=environment)

    def copy(self, source: Path, *, device: int, destination: Path) -> None:
        copy_here(source, destination)  # the devices share this machine's files

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        copy_here(source, destination)

    def can_return(self, device: int, members: Path) -> bool:
        return members.exists()

    def place(self, device: int) -> list[str]:
        """What enter.py needs to know of a device."""
        namespace = f"/proc/{os.getpid()}/fd/{self.network.devices[device]}"
        groups = map(str, self.group(device).joining)
        return [
            namespace,
            self.names[device],
            str(state.hosts_file(self.name, self.folder)),
            *groups,
        ]

    def _tell(self) -> None:
        LabState(
            lab=self.name,
            process=os.getpid(),
            topology=self.topology.to_json(),
            namespaces=self.network.numbers,
            cores=sum(self.shares),
            run_folder=self.run_folder,
        ).write(self.folder)


def is_root() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def require_root() -> None:
    if sys.platform != "linux":
        raise LabError("the lab needs Linux; use --unshaped for plain local processes")
    if not is_root():
        raise LabError(
            "the lab needs root for namespaces, shaped links and quotas: use sudo, or --unshaped "
            "for plain local processes"
        )


def disk_of(path: Path) -> str | None:
    """The whole disk under a path, as major:minor; None for a file system without one."""
    number = path.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        return None
    entry = entry.resolve()
    if (entry / "partition").exists():
        entry = entry.parent
    return (entry / "dev").read_text(encoding="ascii").strip()


def _write_hosts(topology: Topology, path: Path) -> None:
    """The devices by name, for programs that look each other up."""
    lines = [
        f"{form}{device.address} {device.name}"
        for device in topology.devices
        for form in ("", "::ffff:")  # the second is how a socket for both kinds of address says it
    ]
    path.write_text(
        "\n".join(["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost", *lines, ""]),
        encoding="ascii",
    )


def _free_bytes() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return sys.maxsize


def _start_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Outlives this process; a session of its own keeps it from the terminal's Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-m", "terrazzo.lab.janitor", str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

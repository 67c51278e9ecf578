"""SshHosts: real devices, reached by SSH, as hosts that launching can't tell from others.

with SshHosts.open(Cluster.load(path), folder=path.parent) as hosts:
    hosts.bring(Code.of_script(...))
    launch([sys.executable, "train.py"], hosts)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from terrazzo.cluster.arrivals import Arrivals
from terrazzo.cluster.code import Code
from terrazzo.cluster.connections import connected, look
from terrazzo.cluster.credentials import make_credentials
from terrazzo.cluster.hosts import FOREIGN_PREFIXES, rendezvous
from terrazzo.cluster.inspection import Facts, findings
from terrazzo.cluster.records import Collected
from terrazzo.cluster.remote import RemoteProcess, run_request
from terrazzo.cluster.returning import Returning
from terrazzo.cluster.session import ask, session
from terrazzo.cluster.ssh import Connection, Ssh, one_line
from terrazzo.cluster.veil import Veil, veiled
from terrazzo.errors import HostError, LaunchError
from terrazzo.records import document
from terrazzo.records.cluster import Cluster

RUN_FOLDER = "TERRAZZO_RUN"
"""The variable that names the folder of a run; on a device it is another folder."""
SETTINGS = ("TERRAZZO_MEASURE",)
"""Variables of the starter that mean its devices, too."""
CREDENTIALS = "TERRAZZO_CREDENTIALS"
"""Names the file with the credentials of the run; the same name as in the runtime."""
MEMBERS = "TERRAZZO_MEMBERS"
"""Names the file in which devices write where they are; on a device it is kept like a secret."""
T = TypeVar("T")


class SshHosts:
    """Connected, inspected, and ready; ``open`` makes the connections and ends them."""

    def __init__(
        self, cluster: Cluster, connections: Sequence[Connection], facts: Sequence[Facts]
    ) -> None:
        self.cluster, self.facts = cluster, list(facts)
        self._connections = list(connections)
        self._veil: Veil | None = None
        """The encrypted network, if there is one."""
        self._library = [""] * len(facts)
        self._directory = ["~"] * len(facts)
        self._put: list[set[str]] = [set() for _ in facts]
        self._started: dict[int, RemoteProcess] = {}
        self._collected: dict[int, Collected] = {}
        self._brought: tuple[Code, Code | None] | None = None
        self._members = ""
        """Where the members of the run are, as one of them has told last."""
        self._returning = Returning(self._reopen, self._prepare)
        self._arrivals: Arrivals | None = None
        self._grown, self._told = cluster, ""
        """The cluster with a device that may come next; why that has not, as was told last."""
        self._run_folder: Path | None = None
        self._credentials = make_credentials() if len(facts) > 1 else ""

    @classmethod
    @contextmanager
    def open(cls, cluster: Cluster, *, folder: Path, ready: bool = True) -> Iterator[SshHosts]:
        """All devices at once; the first that can't be used is named, and nothing is started.

        Those that are not ``ready`` for a training may still be good enough for being set up.
        """
        with connected(cluster, folder=folder) as (connections, facts):
            missing = [fact for fact in facts if isinstance(fact, HostError)]
            if missing:
                raise one_line(missing)
            known = [fact for fact in facts if isinstance(fact, Facts)]
            wrong = [finding for finding in findings(cluster, known) if finding.fatal]
            if wrong and ready:
                raise one_line([HostError(str(finding)) for finding in wrong])
            hosts = cls(cluster, [c for c in connections if c is not None], known)
            with ExitStack() as cleanup:
                cleanup.callback(hosts._close)
                cleanup.callback(hosts._clear)
                if cluster.encrypt and len(known) > 1 and ready:
                    ways = [connection.ssh for connection in hosts._connections]
                    hosts._veil = cleanup.enter_context(veiled(ways, known, cluster.lost_after_s))
                yield hosts

    def note_run(self, folder: Path) -> None:
        """Which devices a run was on, and what they had installed: a record of the run."""
        rows = [
            {"address": self.address(number), **asdict(device), **asdict(self.facts[number])}
            for number, device in enumerate(self.cluster.devices)
        ]
        body = {"encrypt": self.cluster.encrypt, "devices": rows}
        document.write(folder / "cluster.json", document.dump("cluster", 1, body) + "\n")

    # ---- files ------------------------------------------------------------------------------

    def bring(self, code: Code | None, *, own: Code | None = None) -> list[int]:
        """Sends what differs of the code, and of Terrazzo itself; how many files went where."""
        self._brought = own or Code.of_terrazzo(), code
        return self._everywhere(self._bring)

    def _bring(self, device: int) -> int:
        assert self._brought is not None
        (library, code), base = self._brought, PurePosixPath(self.facts[device].workdir)
        place = str(base / "terrazzo" / library.digest)
        count = self._sync(device, library, place, prune=True)
        self._library[device] = place
        if code is not None:
            place = str(base / "code" / code.name)
            count += self._sync(device, code, place)
            self._directory[device] = str(PurePosixPath(place) / code.directory)
        return count

    def _sync(self, device: int, code: Code, folder: str, *, prune: bool = False) -> int:
        files = {name: list(entry) for name, entry in code.files.items()}
        request = {"folder": folder, "files": files, "prune": prune}
        with session(self._ssh(device), "sync", **request) as one:
            missing = one.hear()["missing"]
            for name in missing:
                one.send_file(code.root / name, code.files[name][1])
            return int(one.hear()["brought"])

    def copy(
        self, source: Path, *, device: int, destination: Path, removing: Path | None = None
    ) -> None:
        """It, or the folder around it, is removed again when these hosts are closed."""
        self._put[device].add(str(removing or destination))
        self._send(source, device, destination)

    def _send(self, source: Path, device: int, destination: Path) -> None:
        paths = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else []
        pairs = [(path, destination / path.relative_to(source)) for path in paths]
        if source.is_file():
            pairs = [(source, destination)]
        sizes = [path.stat().st_size for path, _ in pairs]
        rows = [[str(pair[1]), size, 0o600] for pair, size in zip(pairs, sizes, strict=True)]
        with session(self._ssh(device), "put", files=rows) as one:
            for (path, _), size in zip(pairs, sizes, strict=True):
                one.send_file(path, size)
            one.hear()

    def leave(self, source: Path, destination: Path) -> None:
        """Brings a file to all devices that stays there."""
        self._everywhere(lambda device: self._send(source, device, destination))

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        with session(self._ssh(device), "fetch", path=str(source)) as one:
            one.receive_file(destination)
            one.hear()

    def run_place(self, device: int, name: str) -> PurePosixPath:
        """Where a device keeps what it records of a run."""
        return PurePosixPath(self.facts[device].workdir) / "runs" / name

    def ask_all(self, verb: str, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        """One question to each device, all at once."""
        return self._everywhere(lambda device: ask(self._ssh(device), verb, **requests[device]))

    # ---- the rest of the interface ----------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return self.cluster.names

    def address(self, device: int) -> str:
        if self._veil is not None:
            return self._veil.address(device)
        return self.facts[device].address(self.cluster.devices[device])

    def interface(self, device: int) -> str:
        if self._veil is not None:
            return self._veil.interface(device)
        return self.facts[device].interface(self.cluster.devices[device])

    def port(self) -> AbstractContextManager[int]:
        """Free when it was asked for: devices start a moment later, on a machine of their own."""
        return nullcontext(int(ask(self._ssh(0), "port", address=self.address(0))))

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """Only what was set for this run: the starter's own environment is of another machine."""
        given = {
            key: value
            for key, value in base.items()
            if (key in SETTINGS or os.environ.get(key) != value)
            and not key.startswith(FOREIGN_PREFIXES)
        }
        if RUN_FOLDER in given:
            self._run_folder = Path(given[RUN_FOLDER])
            given[RUN_FOLDER] = self._remote_run(device)
        wanted, fact = self.cluster.devices[device], self.facts[device]
        own = {
            "OMP_NUM_THREADS": str(wanted.threads or fact.cores),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": self._library[device],
            "GLOO_SOCKET_IFNAME": self.interface(device),
            **self.cluster.environment,
            **given,
        }
        if path := self.cluster.environment.get("PYTHONPATH"):
            own["PYTHONPATH"] = f"{self._library[device]}:{path}"
        return own | rendezvous(device, len(self.names), at=(self.address(0), port))

    def run(
        self, command: Sequence[str], *, device: int, environment: Mapping[str, str]
    ) -> RemoteProcess:
        words = list(command)
        if words[0] == sys.executable:
            words[0] = self.facts[device].executable
        secrets = {CREDENTIALS: self._credentials} if len(self.names) > 1 else {}
        if MEMBERS in environment:
            secrets[MEMBERS] = self._members
        request = run_request(
            words,
            environment=dict(environment),
            directory=self._directory[device],
            records=environment.get(RUN_FOLDER, ""),
            secrets=secrets,
            lost_after_s=self.cluster.lost_after_s,
        )
        process = RemoteProcess(
            self._ssh(device), device=device, request=request, heard=self._hear_members,
            collected=self._collecting(device) if RUN_FOLDER in environment else None,
        )  # fmt: skip
        self._started[device] = process
        return process

    def kill(self, device: int) -> None:
        if device in self._started:
            self._started[device].signal(9)

    # ---- devices that come back -------------------------------------------------------------

    def can_return(self, device: int, members: Path) -> bool:
        """Once a member has told where they are, and the device answers, after a reboot too."""
        return bool(self._members) and self._returning.is_ready(device)

    def watch(self, path: Path) -> None:
        """From now on devices that are written into the cluster's file may join the others."""
        self._arrivals = Arrivals(path)

    def newcomer(self) -> int | None:
        """The number of one that is ready to be started; LaunchError, once, says why it is not."""
        coming = self._arrivals.next() if self._arrivals is not None and self._members else None
        if coming is None or self._arrivals is None:
            return None
        number = len(self.names)
        self._grown = replace(self.cluster, devices=(*self.cluster.devices, coming))
        if not self._returning.is_ready(number):
            error = self._returning.trouble.pop(number, None)
            if error is not None and str(error) != self._told:
                self._told = str(error)
                raise error
            return None
        self.cluster = self._grown
        self._arrivals.came()
        if self._run_folder is not None:
            self.note_run(self._run_folder)
        return number

    def _hear_members(self, text: str) -> None:
        self._members = text

    def _reopen(self, device: int) -> None:
        """By the thread that asks: a connection ends with the one that has opened it."""
        if device == len(self._connections):
            way = self._ssh(0)
            new = replace(
                way, device=self._grown.devices[device], socket=way.socket.with_name(str(device))
            )
            self._connections.append(Connection(new))
            self._library.append("")
            self._directory.append("~")
            self._put.append(set())
        old = self._connections[device]
        if not old.is_open:
            old.close()
            self._connections[device] = Connection(old.ssh)

    def _prepare(self, device: int) -> None:
        """A board that was set up anew while it was away may have changed."""
        connection = self._connections[device]
        fact = look(connection)
        if isinstance(fact, HostError):
            connection.close()  # the next try is made over a new one
            raise fact
        facts = [*self.facts[:device], fact, *self.facts[device + 1 :]]
        cluster = replace(self._grown, devices=self._grown.devices[: len(facts)])
        if wrong := [one for one in findings(cluster, facts) if one.fatal]:
            raise one_line([HostError(str(one)) for one in wrong])
        self.facts[device : device + 1] = [fact]  # others may be prepared at the same time
        self._bring(device)
        if self._veil is not None:  # its end is gone with the connection
            self._veil.mend(device, connection.ssh, fact.address(connection.ssh.device))

    # ---- inside -----------------------------------------------------------------------------

    def _collecting(self, device: int) -> Collected:
        assert self._run_folder is not None
        before = self._collected.get(device)
        self._collected[device] = Collected(self._run_folder, device, before=before)
        return self._collected[device]

    def _ssh(self, device: int) -> Ssh:
        return self._connections[device].ssh

    def _remote_run(self, device: int) -> str:
        assert self._run_folder is not None
        return str(self.run_place(device, self._run_folder.name))

    def _everywhere(self, work: Callable[[int], T]) -> list[T]:
        """On all devices at once; when one fails, or by Ctrl-C, the others are not waited for."""
        with ThreadPoolExecutor(max_workers=len(self.names)) as pool:
            try:
                return list(pool.map(work, range(len(self.names))))
            except BaseException:
                for connection in self._connections:
                    connection.close()
                raise

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._returning.close()

    def _clear(self) -> None:
        """Removes what was put on devices, and records that were collected whole."""

        def clear(device: int) -> None:
            paths = sorted(self._put[device])
            whole = all(
                p.is_collected for p in self._started.values()
            )  # who share a home share the folder
            if self._run_folder is not None and whole:
                paths.append(self._remote_run(device))
            if paths and self._connections[device].is_open:
                with suppress(LaunchError):
                    ask(self._ssh(device), "remove", paths=paths)

        self._everywhere(clear)

"""Connections to all devices of a cluster at once, and what each device says of itself."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from terrazzo.cluster.inspection import Facts
from terrazzo.cluster.session import ask
from terrazzo.cluster.ssh import Connection, Ssh, require_ssh
from terrazzo.errors import HostError
from terrazzo.records.cluster import Cluster

SOCKETS = "tz-ssh-"


@contextmanager
def connected(
    cluster: Cluster, *, folder: Path
) -> Iterator[tuple[list[Connection | None], list[Facts | HostError]]]:
    """Connections to all devices that can be reached, and what each says of itself."""
    require_ssh()
    config = str(folder / Path(cluster.ssh_config).expanduser()) if cluster.ssh_config else ""
    remove_stale(Path(tempfile.gettempdir()))
    sockets = Path(tempfile.mkdtemp(prefix=f"{SOCKETS}{os.getpid()}-"))
    connections: list[Connection] = []
    try:
        # Started by this very thread: they are tied to its life.
        for number, device in enumerate(cluster.devices):
            connections.append(
                Connection(Ssh(device, sockets / str(number), config, cluster.lost_after_s))
            )
        with ThreadPoolExecutor(max_workers=len(connections)) as pool:
            facts = list(pool.map(look, connections))
        opened = [
            connection if isinstance(fact, Facts) else None
            for connection, fact in zip(connections, facts, strict=True)
        ]
        yield opened, facts
    finally:
        for connection in connections:
            connection.close()
        shutil.rmtree(sockets, ignore_errors=True)


def remove_stale(place: Path) -> None:
    """Folders of starters that were killed; their connections have ended with them."""
    for path in place.glob(f"{SOCKETS}*-*"):
        number = path.name.removeprefix(SOCKETS).partition("-")[0]
        with suppress(OSError):
            own = path.lstat().st_uid == os.geteuid()
            if own and number.isdigit() and not is_running(int(number)):
                shutil.rmtree(path)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def look(connection: Connection) -> Facts | HostError:
    try:
        connection.wait()
        asked_s = time.time()
        body = ask(connection.ssh, "look", workdir=connection.ssh.device.workdir)
    except HostError as error:
        return error
    return Facts.of(body, asked_s=asked_s, answered_s=time.time())

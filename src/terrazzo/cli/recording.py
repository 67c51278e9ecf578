"""Recording: a launch whose beginning and end are written into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from terrazzo.cli.place import place_text
from terrazzo.cluster import Hosts, LaunchResult, LocalHosts, launch
from terrazzo.cluster.board import Board
from terrazzo.cluster.launch import nobody
from terrazzo.measure.key import WHERE
from terrazzo.records.run import DONE, FAILED, INTERRUPTED, Run, RunFolder

RUN_FOLDER = "TERRAZZO_RUN"
"""The variable in which ``terrazzo.init`` finds the folder; the same name as there."""
MEMBERS = "members.json"
"""Where the devices of a run are, while it goes on."""


def launch_recorded(
    command: Sequence[str],
    hosts: Hosts | int,
    *,
    folder: RunFolder,
    name: str,
    typed: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    per_device_env: Sequence[Mapping[str, str]] | None = None,
    grace_s: float = 10.0,
    survive: bool = False,
    restarts: int = 0,
    newcomer: Callable[[], int | None] = nobody,
    output: Callable[[int, str], None] | None = None,
    board: bool = False,
    on: str = "",
) -> LaunchResult:
    """Launches a command with the devices' records in ``folder``.

    ``typed`` is what a person types to have this again, where that is another command. With
    ``board`` lines are kept in the folder, and a terminal shows how devices are doing. Devices
    that are lost are started again up to ``restarts`` times; ``newcomer`` gives one more.
    """
    devices = hosts if isinstance(hosts, int) else len(hosts.names)
    run = Run.begin(name, typed or command, devices, on=on)
    folder.write(run)
    given = {
        **(env or {}),
        RUN_FOLDER: str(folder.path.resolve()),
        WHERE: place_text(hosts, on),
    }
    members = folder.path / MEMBERS if survive and restarts else None
    try:
        with ExitStack() as cleanup:
            sink = cleanup.enter_context(Board(_names(hosts), folder.path)) if board else None
            result = launch(
                command,
                hosts,
                env=given,
                per_device_env=per_device_env,
                grace_s=grace_s,
                survive=survive,
                members=members,
                restarts=restarts,
                newcomer=newcomer,
                output=output,
                sink=sink,
            )
    except KeyboardInterrupt:
        folder.write(run.end(INTERRUPTED))
        raise
    finally:
        if members is not None:  # it holds a secret, and nobody can join any more
            members.unlink(missing_ok=True)
    failure = str(result.failure) if result.failure else ""
    run = replace(run, devices=len(result.statuses))  # some may have come later
    folder.write(run.end(DONE if result.ok else FAILED, failure))
    return result


def _names(hosts: Hosts | int) -> Sequence[str]:
    return LocalHosts(hosts).names if isinstance(hosts, int) else hosts.names

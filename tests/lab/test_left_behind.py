"""A lab leaves nothing behind: not at its end, not when its process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from emulated import PRESETS, described
from waiting import is_running, wait_until

from terrazzo.lab import LabHosts, state
from terrazzo.lab.groups import find_groups

pytestmark = pytest.mark.timeout(120)

# A lab whose devices start a process that leaves its group and its session: a hard one to find.
LAB = """
import pathlib, sys
from terrazzo.cluster import launch
from terrazzo.lab import LabHosts, Topology, load_presets
presets = load_presets([pathlib.Path(sys.argv[1])])
stray = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"
with LabHosts.open(Topology.parse("2xsmall", presets)) as hosts:
    code = "import subprocess, sys, time\\n"
    code += f"subprocess.Popen([sys.executable, '-S', '-c', {stray!r}])"
    print(hosts.name, flush=True)
    launch([sys.executable, "-S", "-c", code + "; time.sleep(600)"], hosts)
"""


until = partial(wait_until, limit_s=20.0)


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A lab in a process of its own, once strays live in both its devices."""
    path = folder / "small.toml"
    path.write_text(PRESETS)
    process = subprocess.Popen(
        [sys.executable, "-c", LAB, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lab = process.stdout.readline().strip()
    assert lab
    assert until(lambda: len(find_groups().processes(lab)) >= 4)
    process.stdout.close()
    return process, lab


def traces(lab: str) -> list[str]:
    """Everything that tells of a lab: processes, groups, files."""
    groups = find_groups()
    found = [f"process {process}" for process in groups.processes(lab)]
    found += [path.name for path in state.FOLDER.iterdir() if lab in path.name]
    return found + (["groups"] if lab in groups.labs() else [])


def janitors() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"terrazzo.lab.janitor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_at_its_end(tmp_path: Path) -> None:
    before = Path("/proc/net/dev").read_text().count(":")
    with LabHosts.open(described("2xsmall", tmp_path)) as hosts:
        assert traces(hosts.name)
        assert Path("/proc/net/dev").read_text().count(":") == before  # nothing added to ours
    assert traces(hosts.name) == []


def test_when_the_block_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        LabHosts.open(described("1xsmall", tmp_path)) as hosts,
    ):
        _ = 1 // 0
    assert traces(hosts.name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_its_process_is_ended(tmp_path: Path, number: int) -> None:
    process, lab = start(tmp_path)
    inside = find_groups().processes(lab)
    process.send_signal(number)
    process.wait(20)
    assert until(lambda: traces(lab) == []), traces(lab)
    assert not any(map(is_running, inside))


def test_when_its_process_takes_its_time_to_die(tmp_path: Path) -> None:
    """The files of a process close before it counts as dead; here it lives on for a second."""
    maker = """if True:
        import os, pathlib, subprocess, sys, time
        from terrazzo.lab import state
        folder = pathlib.Path(sys.argv[1])
        (folder / f"lab-{state.new_name()}.json").touch()
        janitor = [sys.executable, "-m", "terrazzo.lab.janitor", str(folder), str(os.getpid())]
        subprocess.Popen(janitor, stdin=subprocess.PIPE, start_new_session=True).stdin.close()
        time.sleep(1)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", maker, str(tmp_path)], check=True)
    assert until(lambda: not list(tmp_path.glob("lab-*.json")))


def test_when_nobody_was_left_to_clean_up(tmp_path: Path) -> None:
    others = set(janitors())
    process, lab = start(tmp_path)
    (janitor,) = set(janitors()) - others
    os.kill(janitor, signal.SIGKILL)
    process.kill()
    process.wait(20)
    assert "groups" in traces(lab)
    with LabHosts.open(described("1xsmall", tmp_path)):  # the next start
        assert traces(lab) == []


def test_by_command_and_again(tmp_path: Path) -> None:
    others = set(janitors())
    process, lab = start(tmp_path)
    (janitor,) = set(janitors()) - others
    os.kill(janitor, signal.SIGKILL)
    process.kill()
    process.wait(20)
    clean = [sys.executable, "-m", "terrazzo.cli", "lab", "clean"]
    first = subprocess.run(clean, capture_output=True, text=True, check=True)
    assert f"removed what lab {lab} left" in first.stdout
    assert traces(lab) == []
    second = subprocess.run(clean, capture_output=True, text=True, check=True)
    assert lab not in second.stdout

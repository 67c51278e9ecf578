"""What can be known about 64-bit Arm boards without one: ``make check-arm64``.

First, the wheels: for each Python, everything that Terrazzo needs at run time must exist as a wheel
and stay small. torch is left out: which build to take is the user's choice (docs/install.md). Then,
the code: tests that need no torch, and the planner, run on an emulated Cortex-A72, the core of a
Raspberry Pi 4. With ``--torch 2.9.1`` that torch goes in too (about 100 MB), and two emulated
devices check a model against one.

Emulation shows that instructions exist and numbers agree. It says nothing about speed or memory.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from board import Board, NoBoard, is_arm64, make_board
from packaging.requirements import Requirement
from wheels import NoAnswer, NoWheel, Wheel, closure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LIMIT_MB = 30.0
CORE = "cortex-a72"
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
LEFT_OUT = "torch"
SLOW = "-o timeout=3000"  # an emulated core is ten to twenty times slower than this one

PROBE = """
import importlib.util, sys
from pathlib import Path
sys.modules["torch"] = sys.modules["numpy"] = None
for name in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        print(name, "needs " + str(error.name).split(".")[0], sep="\\t")
    else:
        print(name, "starts processes" if "subprocess" in vars(module) else "", sep="\\t")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it takes minutes: show how far it is
    good = _check_wheels(options.python, limit_mb=options.limit)
    if options.no_emulation:
        print("\nNOT RUN: the emulated board, because of --no-emulation")
    else:
        good &= _check_board(options.torch)
    print("\ncheck-arm64:", "passed" if good else "FAILED")
    return 0 if good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--limit", type=float, default=LIMIT_MB, metavar="MB")
    parser.add_argument("--no-emulation", action="store_true", help="weigh the wheels only")
    parser.add_argument("--torch", metavar="VERSION", help="a CPU build to emulate, such as 2.9.1")
    return parser.parse_args(arguments)


# ---- wheels ---------------------------------------------------------------------------------


def needed() -> list[Requirement]:
    """What the package asks for at run time, torch aside."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    return [requirement for requirement in found if requirement.name != LEFT_OUT]


def _check_wheels(pythons: Sequence[str], *, limit_mb: float) -> bool:
    requirements = needed()
    print(f"wheels for linux aarch64 of {', '.join(map(str, requirements))} and what they need")
    print(f"(newest versions in range; {LEFT_OUT} is not counted; limit {limit_mb:g} MB)\n")
    good = True
    for python in pythons:
        try:
            good &= _show(python, closure(requirements, python), limit_mb)
        except (NoWheel, NoAnswer) as error:
            what = "NO WHEEL" if isinstance(error, NoWheel) else "CANNOT TELL, pip failed"
            print(f"Python {python}: {what}: {error}")
            good = False
    return good


def _show(python: str, wheels: Sequence[Wheel], limit_mb: float) -> bool:
    print(f"Python {python}")
    for wheel in wheels:
        print(f"  {wheel.name:<18}{wheel.version:<12}{wheel.size_bytes / 1e6:7.2f} MB")
    total_mb = sum(wheel.size_bytes for wheel in wheels) / 1e6
    verdict = "" if total_mb <= limit_mb else f"  OVER the limit of {limit_mb:g} MB"
    print(f"  {'total':<30}{total_mb:7.2f} MB{verdict}")
    return total_mb <= limit_mb


# ---- an emulated board ----------------------------------------------------------------------


def _check_board(torch: str | None) -> bool:
    print(f"\nan emulated {CORE}")
    if is_arm64():
        print("NOT RUN: this machine is arm64 itself; `make test` is the better test here")
        return True
    with tempfile.TemporaryDirectory(prefix="terrazzo-board-") as folder:
        try:
            board = make_board(Path(folder), core=CORE)
            board.install(TEST_TOOLS, pins=PROJECT / "constraints.txt")
            if torch:
                _install_torch(board, torch)
        except (NoBoard, NoWheel, NoAnswer) as error:
            print(f"NOT RUN, so nothing is known about this core: {error}")
            return False
        print(f"Python {board.python_version} for aarch64, unpacked and started")
        good = _same_plans(board, Path(folder))
        good &= _pure_tests(board)
        if torch:
            good &= _two_devices(board, Path(folder))
        return good


def _install_torch(board: Board, version: str) -> None:
    board.install([str(requirement) for requirement in needed()])
    # Its own dependencies by name: pip would answer their markers for this machine and fetch CUDA.
    plain = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
    board.install(plain)
    board.install([f"torch=={version}"], "--no-deps")


def _same_plans(board: Board, folder: Path) -> bool:
    """Plans made on the board are those made here."""
    graph = folder / "graph.json"
    make = (
        "import sys, torch; from pathlib import Path\n"
        "from terrazzo.graph.export import export; from terrazzo.zoo import resnet18\n"
        "graph = export(resnet18(), (torch.zeros(2, 3, 97, 131),)).graph\n"
        "Path(sys.argv[1]).write_text(graph.to_json())"
    )
    subprocess.run([sys.executable, "-c", make, str(graph)], check=True)
    script = [str(HERE / "plan_digest.py"), str(graph)]
    here = subprocess.run([sys.executable, *script], capture_output=True, text=True, check=True)
    status, there = board.run(script, path=PROJECT / "src")
    if status == 0 and there == here.stdout:
        print("  plans of a resnet18 for 2, 3 and 6 devices: the same as on this machine")
        return True
    print(f"  plans DIFFER (exit status {status})\n  here:\n{here.stdout}  there:\n{there}")
    return False


def _pure_tests(board: Board) -> bool:
    """The unit tests that need neither torch nor processes, which an emulator can't start."""
    files = sorted(map(str, (PROJECT / "tests/unit").glob("test_*.py")))
    probe = [sys.executable, "-c", PROBE, *files]
    told = subprocess.run(probe, cwd=PROJECT, capture_output=True, text=True, check=True)
    reasons = dict(line.split("\t") for line in told.stdout.splitlines())
    for name, reason in reasons.items():
        if reason:
            print(f"  not for the board: {Path(name).name} ({reason})")
    chosen = [name for name, reason in reasons.items() if not reason]
    if not chosen:
        print("  NO TEST can run without torch: nothing was tested")
        return False
    begin_s = time.monotonic()
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *SLOW.split(), *chosen]
    status, output = board.run(command, path=PROJECT / "src")
    names = ", ".join(Path(name).name for name in chosen)
    closing = output.strip().splitlines()[-1] if output.strip() else "no output"
    print(f"  {names}: {closing} ({time.monotonic() - begin_s:.0f} s under emulation)")
    if status:
        print(output)
    return status == 0


def _two_devices(board: Board, folder: Path) -> bool:
    """Two emulated devices against one, over real connections."""
    from terrazzo.cli.check_job import CheckJob
    from terrazzo.cluster.hosts import LocalHosts, reserved_port
    from terrazzo.records.check import CheckReport

    job = CheckJob(
        model=f"{HERE / 'board_model.py'}:build",
        inputs=("2x3x17x19",),
        layout=None,
        groups=None,
        training=True,
        seed=0,
        tolerance=1e-10,
    )
    job.write(folder)
    command = ["-m", "terrazzo.cli.check_worker", str(folder)]
    with reserved_port() as port:
        processes = [
            board.start(
                command,
                path=PROJECT / "src",
                env=LocalHosts(2).environment(device, port=port, base=os.environ),
            )
            for device in range(2)
        ]
        outputs = [process.communicate()[0] for process in processes]
    path = CheckJob.report_path(folder)
    if any(process.returncode for process in processes) or not path.exists():
        print("  two devices: the check did not finish", *outputs, sep="\n")
        return False
    report = CheckReport.from_json(path.read_text(encoding="utf-8"))
    print("  two devices against one:", *str(report).splitlines(), sep="\n    ")
    return report.ok


if __name__ == "__main__":
    sys.exit(main())

"""Shell completion, asked of real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.cli.completion import SCRIPT_OF, quoted
from terrazzo.cli.grammar import Command, grammar
from terrazzo.cli.main import parser

pytestmark = pytest.mark.timeout(60)

ASK = """\
compopt() { :; }  # the builtin works only while readline completes
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_terrazzo
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def top() -> Command:
    return grammar(parser())


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script for each shell, as the command prints it."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SCRIPT_OF:
        command = [sys.executable, "-m", "terrazzo.cli", "completion", shell]
        with (folder / shell).open("w") as file:
            subprocess.run(command, stdout=file, check=True)
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to complete files in."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("train.py", "my train.py", "notes.txt"):
        (folder / name).touch()
    (folder / "data").mkdir()
    return folder


def need(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed: its completion was NOT tested")
    return found


def ask_bash(scripts: Path, desk: Path, *words: str) -> list[str]:
    """What bash would offer for the last of these words."""
    command = [need("bash"), "--norc", "-c", ASK, "bash", str(scripts / "bash"), *words]
    done = subprocess.run(command, cwd=desk, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


class TestBash:
    def test_it_is_registered(self, scripts: Path) -> None:
        code = f"source {quoted(str(scripts / 'bash'))}; complete -p terrazzo"
        done = subprocess.run([need("bash"), "-c", code], capture_output=True, text=True)
        assert done.stdout == "complete -F _terrazzo terrazzo\n"

    def test_commands(self, scripts: Path, desk: Path, top: Command) -> None:
        names = sorted(command.path[-1] for command in top.commands)
        assert "run" in names
        assert ask_bash(scripts, desk, "terrazzo", "") == names
        assert ask_bash(scripts, desk, "terrazzo", "ru") == ["run"]

    def test_options_of_every_command(self, scripts: Path, desk: Path, top: Command) -> None:
        for command in top.walk():
            flags = sorted(flag for option in command.options for flag in option.flags)
            assert ask_bash(scripts, desk, "terrazzo", *command.path, "-") == flags

    @pytest.mark.parametrize(
        ("line", "offers"),
        [
            ("completion |", ["bash", "fish", "zsh"]),
            ("completion f|", ["fish"]),
            ("check --eval --gr|", ["--groups"]),
            ("check --layout w|", ["whole"]),
            ("check --layout = w|", ["whole"]),  # --layout=w, as bash cuts it
            ("check --layout tiles : 2x2 --ev|", ["--eval"]),
            ("check train.py : build --ev|", ["--eval"]),
            ("check train.py : bu|", []),
            ("check |", ["data", "my train.py", "train.py"]),
            ("run --on |", []),
            ("run --on 3 t|", ["train.py"]),
            ("run --on 3 train.py |", ["data", "my train.py", "notes.txt", "train.py"]),
            ("run --on 3 train.py --gr|", []),  # the script's own
            ("run --run-dir |", ["data"]),
        ],
    )
    def test_values_and_places(
        self, line: str, offers: list[str], scripts: Path, desk: Path
    ) -> None:
        words = line.removesuffix("|").split(" ")
        assert ask_bash(scripts, desk, "terrazzo", *words) == offers

    def test_the_tab_key(self, scripts: Path, desk: Path) -> None:
        """An interactive bash with a terminal: what is typed, completed, reaches the command."""
        shell = Terminal([need("bash"), "--norc", "-i"], desk)
        try:
            shell.type("bind 'set bell-style none'; PS1=; terrazzo() { printf '<%s>' \"$@\"; }\n")
            shell.type(f"source {quoted(str(scripts / 'bash'))}; echo rea''dy\n")
            shell.expect("ready")
            shell.type("terrazzo ru\t--gr\t7 my\t--grace\n")
            shell.expect("<run><--grace><7><my train.py><--grace>")
            shell.type("terrazzo check --layout ti\t2x2 tr\t--ev\t; echo do''ne\n")
            shell.expect("<check><--layout><tiles:2x2><train.py><--eval>")
        finally:
            shell.close()


class TestOtherShells:
    def test_fish(self, scripts: Path, desk: Path, top: Command) -> None:
        code = f"source {quoted(str(scripts / 'fish'))}; complete -C $argv[1]"

        def ask(line: str) -> set[str]:
            command = [need("fish"), "--no-config", "-c", code, line]
            done = subprocess.run(command, cwd=desk, capture_output=True, text=True, check=True)
            return {offer.split("\t")[0] for offer in done.stdout.splitlines()}

        assert ask("terrazzo ") == {command.path[-1] for command in top.commands}
        assert ask("terrazzo check --gr") == {"--groups"}
        assert ask("terrazzo check --layout ") == {"auto", "tiles:", "whole"}
        assert ask("terrazzo completion ") == {"bash", "fish", "zsh"}
        assert "train.py" in ask("terrazzo run t")

    def test_zsh_reads_it(self, scripts: Path) -> None:
        done = subprocess.run(
            [need("zsh"), "-f", "-n", str(scripts / "zsh")], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_zsh_has_a_function_for_every_command(self, scripts: Path, top: Command) -> None:
        text = (scripts / "zsh").read_text()
        for command in top.walk():
            name = "_".join(("_terrazzo", *command.path))
            body = text.split(f"\n{name}() {{", 1)[1].split("\n}\n", 1)[0]
            for option in command.options:
                assert all(f"*{flag}" in body for flag in option.flags)


class Terminal:
    """A program in a terminal of its own, typed to and read from."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(command[0], command, {**os.environ, "TERM": "dumb", "HISTFILE": ""})
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str, *, limit_s: float = 20.0) -> None:
        """Reads until the text appears."""
        end_s = time.monotonic() + limit_s
        while text not in self.text:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self.fd], [], [], left_s)[0]:
                raise AssertionError(f"{text!r} did not appear in {self.text!r}")
            self.text += os.read(self.fd, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self.fd)
        os.waitpid(self.pid, 0)

"""A session with a device's agent: the agent's own text is sent first, then one request."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from terrazzo.cluster.agent.files import receive_file
from terrazzo.cluster.agent.frames import DATA, FrameError, Frames, Refused
from terrazzo.cluster.ssh import Ssh, shell_word
from terrazzo.errors import HostError

AGENT = Path(__file__).with_name("agent")
MODULES = (
    "frames",
    "look",
    "files",
    "calls",
    "shelf",
    "vitals",
    "listening",
    "ward",
    "veil",
    "main",
)  # what imports comes after
PACKAGE = "terrazzo.cluster.agent"
BOOT = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
LOADER = """
import json, sys, types
texts = json.loads({texts!r})
for name in {packages!r}:
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = []
for name, text in texts.items():
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
sys.modules[{main!r}].main()
"""
CHUNK_BYTES = 1 << 20
SENTENCE = 200
STOP_S = 5.0
LOST = 255
"""The status of ssh where ssh itself failed."""


@cache
def agent_text() -> bytes:
    """The agent as one text, led by its length, for a Python that waits for it on its input."""
    texts = {
        f"{PACKAGE}.{name}": (AGENT / f"{name}.py").read_text(encoding="utf-8") for name in MODULES
    }
    parts = PACKAGE.split(".")
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    text = LOADER.format(texts=json.dumps(texts), packages=packages, main=f"{PACKAGE}.main")
    body = text.encode()
    return b"%d\n%s" % (len(body), body)


def agent_command(ssh: Ssh) -> list[str]:
    """Becomes Python on the device, which waits for the agent's text."""
    return ssh.sharing(f"exec {shell_word(ssh.device.python)} -I -c '{BOOT}'")


class Session:
    """One agent at work; ``ask`` opens one for a single question."""

    def __init__(self, ssh: Ssh, process: subprocess.Popen[bytes], frames: Frames) -> None:
        self.ssh, self.process, self.frames = ssh, process, frames

    def begin(self, request: dict[str, Any]) -> None:
        with self._named():
            assert self.process.stdin is not None
            self.process.stdin.write(agent_text())
            self.process.stdin.flush()
            self.frames.find_mark()
            self.frames.tell(request)

    def tell(self, value: Any) -> None:
        with self._named():
            self.frames.tell(value)

    def hear(self) -> Any:
        """Its next answer."""
        with self._named():
            return self.frames.hear()

    def send_file(self, path: Path, size: int) -> None:
        """A file as announced; what has changed since is found out by its digest there."""
        with self._named(), path.open("rb") as file:
            left = size
            while left > 0:
                body = file.read(min(CHUNK_BYTES, left)) or bytes(min(CHUNK_BYTES, left))
                self.frames.send(DATA, body)
                left -= len(body)

    def receive_file(self, path: Path) -> None:
        with self._named():
            size = int(self.frames.hear()["size"])
            receive_file(self.frames, path, size=size, mode=0o644)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What goes wrong with this device names this device, whoever else is being talked to."""
        try:
            yield
        except Refused as error:
            raise self._refused(error) from error
        except (EOFError, OSError, FrameError, ValueError) as error:
            raise self._trouble(error) from error

    def _refused(self, error: Refused) -> HostError:
        full = os.strerror(errno.ENOSPC) in str(error)
        remedy = ". Make room there, or write workdir = on another disk for it" if full else ""
        return HostError(f"{self.ssh.device.title}: {error}{remedy}")

    def _trouble(self, error: Exception) -> HostError:
        """Why the agent did not answer: its last words, those of ssh, or of the login shell."""
        title = self.ssh.device.title
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:  # it may have refused while much was still being sent
            while True:
                self.frames.hear()
        except Refused as refusal:
            return self._refused(refusal)
        except (EOFError, OSError, FrameError, ValueError):
            said = self._said()
        if self.process.poll() in (126, 127):
            return HostError(
                f"{title} has no Python as {self.ssh.device.python}: install it there, or write "
                'python = "..." for this device'
            )
        if self.process.poll() == LOST:
            return self.ssh.explain(said or str(error))
        if not said and isinstance(error, EOFError):
            return HostError(
                f"{title}: {self.ssh.device.python} ended without a word: is it Python 3.10 or "
                'newer? Write python = "..." for this device'
            )
        gist = said.splitlines()[-1] if said else f"{type(error).__name__} {error}".strip()
        return HostError(f"{title} did not answer as it should: {gist[:SENTENCE]}")

    def _said(self) -> str:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
            if self.process.stderr is not None:
                return bytes(self.process.stderr.read(65536)).decode("utf-8", "replace").strip()
        return ""


@contextmanager
def session(ssh: Ssh, verb: str, **request: Any) -> Iterator[Session]:
    """An agent that was asked something, until the block ends."""
    process = subprocess.Popen(
        agent_command(ssh), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    one = Session(ssh, process, Frames(*_pipes(process)))
    try:
        one.begin({"verb": verb, **request})
        yield one
    finally:
        close(process)


def ask(ssh: Ssh, verb: str, **request: Any) -> Any:
    """One question, one answer."""
    with session(ssh, verb, **request) as one:
        return one.hear()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[Any, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdout, process.stdin


def close(process: subprocess.Popen[bytes]) -> None:
    """Hangs up; an agent that nobody listens to ends."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

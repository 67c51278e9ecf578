"""A command on a device behind SSH, as whoever launches devices sees it.

The ward on the device sends the command's output, its records and how the device is in frames; a
thread here takes them apart. Signals go the other way, and so does a sign of life now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.cluster.agent.frames import (
    BEAT,
    ENDED,
    ERR,
    ERROR,
    MEMBERS,
    OUT,
    RECORD,
    SIGNAL,
    VITALS,
    FrameError,
    Frames,
)
from terrazzo.cluster.process import LEASH, LineStream, Process
from terrazzo.cluster.records import Collected
from terrazzo.cluster.session import LOST, agent_command, agent_text
from terrazzo.cluster.ssh import Ssh

STOP_S = 5.0


class RemoteProcess(Process):
    """One command on one device; the ssh that carries it is tied to this process."""

    def __init__(
        self,
        ssh: Ssh,
        *,
        device: int,
        request: dict[str, Any],
        collected: Collected | None,
        heard: Callable[[str], None],
    ) -> None:
        """``heard`` is told where the members of the run are, each time that changes."""
        super().__init__(device=device, name=ssh.device.name)
        self._found: int | None = None
        """Its status as the thread knows it; whoever polls sees it then, not before."""
        self.is_collected = False
        """Whether all it recorded is here; what is not must stay there."""
        self._ssh, self._records = ssh, request["records"]
        self._collected, self._heard = collected, heard
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        self._process = subprocess.Popen(
            [*leash, *agent_command(ssh)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        source: Any = self._process.stdout
        sink: Any = self._process.stdin
        self._frames = Frames(source, sink)
        self._ended = threading.Event()
        self._due: list[int] | None = []
        """Signals for when the device listens, which may take it a while; None: it does."""
        self._lock = threading.Lock()
        self._pipes: dict[bytes, int] = {}
        self.stdout, self.stderr = self._stream(OUT), self._stream(ERR)
        request = {"verb": "run", "leash": LEASH.read_text(encoding="utf-8"), **request}
        self._threads = [
            threading.Thread(target=self._listen, args=(request,), daemon=True),
            threading.Thread(target=self._beat, args=(request["lost_after_s"] / 4,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _stream(self, kind: bytes) -> LineStream:
        out, self._pipes[kind] = os.pipe()
        return LineStream(os.fdopen(out, "rb", buffering=0))

    def poll(self) -> int | None:
        self.status = self._found
        return self.status

    def signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._due is None:
                self._frames.send(SIGNAL, b"%d" % number)
            else:
                self._due.append(number)

    def close(self) -> None:
        """Hangs up, which ends the command; ssh has a moment to pass that on."""
        if self.poll() is None:
            self.signal(signal.SIGKILL)
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in self.streams:  # a thread that still writes must not wait for a reader
            stream.close()
        for thread in self._threads:
            thread.join(STOP_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    # ---- threads ----------------------------------------------------------------------------

    def _beat(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            try:
                if self._due is None:
                    self._frames.send(BEAT)
            except (OSError, ValueError):
                return

    def _listen(self, request: dict[str, Any]) -> None:
        status: int | None = None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(agent_text())
            self._process.stdin.flush()
            self._frames.find_mark()
            self._frames.tell(request)
            self._begin()
            while status is None:
                status = self._take(*self._frames.receive())
        except (EOFError, OSError, FrameError, ValueError, KeyError, TypeError):
            status = self._lost()
        for number in self._pipes.values():
            os.close(number)
        if self._collected is not None:
            self._collected.close()
        self._found = status
        self._ended.set()

    def _begin(self) -> None:
        with self._lock:
            due, self._due = self._due or [], None
        for number in due:
            self.signal(number)

    def _take(self, kind: bytes, body: bytes) -> int | None:
        """One frame; the status, once the command has ended."""
        if kind in self._pipes:
            self._write(kind, body)
        elif kind == RECORD and self._collected is not None:
            self._collected.add(body)
        elif kind == VITALS and self._collected is not None:
            self._collected.note(json.loads(body))
        elif kind == MEMBERS:
            self._heard(body.decode())
        elif kind == ENDED:
            told = json.loads(body)
            self._keep(told["left"])
            return int(told["status"])
        elif kind == ERROR:
            self._say(f"{self._ssh.device.title}: {json.loads(body)}")
            return LOST
        return None

    def _keep(self, left: list[str]) -> None:
        """What was not collected stays on the device, and is named."""
        names = [*map(str, left), *(self._collected.dropped if self._collected else ())]
        self.is_collected = not names
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            self._say(
                f"not collected, and kept on {self._ssh.device.title} in {self._records}: "
                f"{', '.join(names[:5])}{more}"
            )

    def _write(self, kind: bytes, body: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            while body:
                body = body[os.write(self._pipes[kind], body) :]

    def _lost(self) -> int:
        """The connection is gone: ssh knows why."""
        if self._ended.is_set():  # closed from here
            return LOST
        said = ""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
            if self._process.stderr is not None:
                said = self._process.stderr.read(65536).decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        gist = lines[-1] if lines else "it ended without a word"
        self._say(
            f"the SSH connection to {self._ssh.device.title} was lost: {gist}. The device ends "
            "what runs there by itself"
        )
        return LOST

    def _say(self, text: str) -> None:
        self._write(ERR, f"terrazzo: {text}\n".encode())


def run_request(
    command: Sequence[str],
    *,
    environment: dict[str, str],
    directory: str,
    records: str,
    secrets: dict[str, str],
    lost_after_s: float,
) -> dict[str, Any]:
    """What the ward is told; each of ``secrets`` becomes a file, named by the variable."""
    return {
        "command": list(command),
        "environment": environment,
        "directory": directory,
        "records": records,
        "secrets": secrets,
        "lost_after_s": lost_after_s,
    }

"""One device's process: its lines of output, its end, and the signals sent to its group."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from terrazzo.errors import LaunchError

LEASH = Path(__file__).with_name("leash.py")
LAST_LINES = 20
TRACEBACK = "Traceback (most recent call last)"
CHUNK_BYTES = 65536
LONGEST_LINE = 1 << 20  # a stream without line ends must not fill memory


@dataclass(frozen=True, slots=True)
class Failure:
    """A device that ended badly: a positive exit status, or minus the number of a signal."""

    device: int
    name: str
    status: int
    last_lines: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = "unnamed"
        hint = ", often the system running out of memory" if name == "SIGKILL" else ""
        return f"signal {-self.status} ({name}{hint})"

    @property
    def in_short(self) -> str:
        """For who has seen the lines already; the last one of a traceback says what is wrong."""
        last = [line.strip() for line in self.last_lines if line.strip()][-1:]
        return ": ".join([f"{self.name} failed with {self.reason}", *last])

    def __str__(self) -> str:
        head = f"{self.name} failed with {self.reason}"
        if not self.last_lines:
            return f"{head}; it wrote nothing to stderr"
        starts = [at for at, line in enumerate(self.last_lines) if TRACEBACK in line]
        lines = self.last_lines[starts[0] if starts else 0 :]  # how far it had come is no cause
        return "\n  ".join([f"{head}; its last lines on stderr:", *lines])


class LineStream:
    """Bytes of a pipe, given back as lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.open = True
        self._pipe = pipe
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> list[str]:
        """The lines finished by what the pipe holds now; at its end also an unfinished one."""
        try:
            data = os.read(self.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return self.close()
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        if len(self._partial) > LONGEST_LINE:
            lines.append(self._partial)
            self._partial = ""
        return [_visible(line) for line in lines]

    def close(self) -> list[str]:
        """Closes the pipe and gives back the unfinished line, if there is one."""
        if not self.open:
            return []
        rest = self._partial + self._decoder.decode(b"", final=True)
        self.open, self._partial = False, ""
        self._pipe.close()
        return [_visible(rest)] if rest else []


class Process(ABC):
    """One device's command as whoever watches it sees it, wherever it runs."""

    stdout: LineStream
    stderr: LineStream

    def __init__(self, *, device: int, name: str) -> None:
        self.device, self.name = device, name
        self.status: int | None = None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def streams(self) -> tuple[LineStream, LineStream]:
        return self.stdout, self.stderr

    @property
    def drained(self) -> bool:
        """Whether all it wrote was read."""
        return not (self.stdout.open or self.stderr.open)

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit status once it has ended: minus the signal's number if one ended it."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Sends a signal to the command and all it started."""

    @abstractmethod
    def close(self) -> None:
        """Ends whatever is left of it, now."""

    def failure(self) -> Failure:
        assert self.status is not None
        return Failure(self.device, self.name, self.status, tuple(self.last_lines))


class DeviceProcess(Process):
    """A command running as one device, leader of a session and process group of its own.

    Its exit is looked at without reaping, so the group's number can't be given to a stranger
    before ``close`` has swept up what the command left running.
    """

    def __init__(
        self, command: Sequence[str], *, device: int, name: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(device=device, name=name)
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*leash, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot start {name} as {command[0]}: {error}") from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout = LineStream(self._process.stdout)
        self.stderr = LineStream(self._process.stderr)

    def poll(self) -> int | None:
        if self.status is None:
            seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is not None:
                exited = seen.si_code == os.CLD_EXITED
                self.status = seen.si_status if exited else -seen.si_status
        return self.status

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends whatever is left of the group, now."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            self._process.wait()
        for stream in self.streams:
            stream.close()


def _visible(line: str) -> str:
    """What a terminal would show of a line that a progress bar kept rewriting."""
    return line.rstrip("\r").rpartition("\r")[2]

"""The ward: runs one command on a device for as long as somebody at the other end listens.

    command ends by itself ──▶ the rest of its records, how it ended
    the starter says so    ──▶ the signal, to all that the command started
    the connection ends, or nothing was heard for a while ──▶ SIGTERM ──▶ SIGKILL, all of it

Whatever leaves its process group or session stays a descendant, and is found and ended too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from terrazzo.cluster.agent.frames import (
    ENDED,
    ERR,
    MEMBERS,
    OUT,
    RECORD,
    SIGNAL,
    VITALS,
    FrameError,
    Frames,
)
from terrazzo.cluster.agent.listening import Silence
from terrazzo.cluster.agent.vitals import Vitals

TICK_S, RECORDS_S, VITALS_S = 0.1, 0.5, 2.0
STOP_S, DRAIN_S = 3.0, 2.0
CHUNK_BYTES = 1 << 16
LARGEST_FILE_BYTES = 64 << 20
SECRETS = "terrazzo-run-"
WHERE = "TERRAZZO_MEMBERS"
"""Names the file in which a device writes where the members of a run are, for those who come later;
the same name as in the api."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Ward:
    """One command, its output, its records, and who may end it."""

    def __init__(self, request: dict[str, Any], frames: Frames) -> None:
        self._frames = frames
        self._lost_after_s = float(request["lost_after_s"])
        self._records = _Records(request, frames) if request["records"] else None
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self._secrets = Secrets(request["secrets"])
        self._told_where = request["secrets"].get(WHERE, "")
        environment = {**os.environ, **request["environment"], **self._secrets.paths}
        directory = Path(request["directory"]).expanduser()
        directory.mkdir(parents=True, exist_ok=True)  # one without files was not brought
        leash = [sys.executable, "-I", "-S", "-c", request["leash"], str(os.getpid())]
        self._process = subprocess.Popen(
            [*leash, *request["command"]],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self) -> None:
        """Until the command has ended; never longer than the starter listens."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pumps = [
            _thread(self._pump, self._process.stdout, OUT),
            _thread(self._pump, self._process.stderr, ERR),
        ]
        _thread(self._watch)
        with suppress(OSError):
            self._until_end()
            for pump in pumps:
                pump.join(DRAIN_S)
            self._end_all(signal.SIGKILL)
            for pump in pumps:
                pump.join(DRAIN_S)
            left = self._records.send_rest() if self._records is not None else []
            self._frames.tell({"status": self._process.returncode, "left": left}, ENDED)
        self._end_all(signal.SIGKILL)
        self._secrets.remove()

    def _until_end(self) -> None:
        vitals, records_s, vitals_s = Vitals(), 0.0, 0.0
        while self._process.poll() is None:
            now_s = time.monotonic()
            if self._records is not None and now_s >= records_s:
                self._records.send_new()
                self._tell_where()
                records_s = now_s + RECORDS_S
            if now_s >= vitals_s:
                self._frames.tell(vitals.read(descendants()), VITALS)
                vitals_s = now_s + VITALS_S
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TICK_S)

    def _tell_where(self) -> None:
        """Only the starter can bring it to a device that comes back."""
        text = self._told_where
        with suppress(KeyError, OSError, UnicodeDecodeError):
            text = Path(self._secrets.paths[WHERE]).read_text(encoding="utf-8")
        if text != self._told_where:
            self._frames.send(MEMBERS, text.encode())
            self._told_where = text

    def _pump(self, pipe: IO[bytes], kind: bytes) -> None:
        with suppress(OSError):
            while body := os.read(pipe.fileno(), CHUNK_BYTES):
                self._frames.send(kind, body)

    def _watch(self) -> None:
        """Ends everything once nobody listens any more."""
        Silence(self._frames, self._lost_after_s, heard=self._obey).wait()
        self._end_all(signal.SIGTERM)
        end_s = time.monotonic() + STOP_S
        while time.monotonic() < end_s and descendants():
            time.sleep(TICK_S)
        self._end_all(signal.SIGKILL)
        time.sleep(TICK_S)
        self._end_all(signal.SIGKILL)
        self._secrets.remove()
        os._exit(1)

    def _obey(self, kind: bytes, body: bytes) -> None:
        if kind != SIGNAL:
            raise FrameError(f"a frame of kind {kind!r} while a command runs")
        self._end_all(int(body))

    def _end_all(self, number: int) -> None:
        for process in descendants():
            with suppress(OSError):
                os.kill(process, number)


class Secrets:
    """Texts that a command finds in files of its own, in memory where the system allows."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.paths: dict[str, str] = {}
        self._folder: Path | None = None
        if not texts:
            return
        places = (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm")
        place = next((name for name in places if name and os.access(name, os.W_OK)), None)
        remove_stale(Path(place or tempfile.gettempdir()))
        prefix = f"{SECRETS}{os.getpid()}-"
        self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # nobody else's
        for name, text in texts.items():
            path = self._folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
            self.paths[name] = str(path)

    def remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def remove_stale(place: Path) -> None:
    """What wards left that were killed: folders of this user, named by a process that is gone."""
    for path in place.glob(f"{SECRETS}*-*"):
        number = path.name.removeprefix(SECRETS).partition("-")[0]
        with suppress(OSError):
            own = path.lstat().st_uid == os.geteuid()
            if own and number.isdigit() and not Path(f"/proc/{number}").exists():
                shutil.rmtree(path)


class _Records:
    """The folder a training records in: what grows is sent as it grows, the rest at the end.

    Devices that share a home share the folder: each sends its own of the files that grow.
    """

    def __init__(self, request: dict[str, Any], frames: Frames) -> None:
        self.folder = Path(request["records"]).expanduser()
        self._own = f"*-{request['environment']['RANK']}.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._frames = frames
        self._sent: dict[str, int] = {}

    def send_new(self) -> None:
        for path in sorted(self.folder.glob(self._own)):
            self._send(path)

    def send_rest(self) -> list[str]:
        """All that is still missing; gives the names of files that are too large for that."""
        self.send_new()
        left = []
        for path in sorted(self.folder.rglob("*")):
            if path.suffix == ".jsonl" or not path.is_file() or path.is_symlink():
                continue
            if path.stat().st_size <= LARGEST_FILE_BYTES:
                self._send(path)
            else:
                left.append(path.relative_to(self.folder).as_posix())
        return left

    def _send(self, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._sent.get(name, 0))
            while body := file.read(CHUNK_BYTES):
                self._frames.send(RECORD, name.encode() + b"\0" + body)
                self._sent[name] = file.tell()


def descendants() -> list[int]:
    """All processes below this one that still run; the nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if words[0] not in "ZX":
                parents.setdefault(int(words[1]), []).append(int(entry.name))
    found = list(parents.get(os.getpid(), ()))
    for process in found:
        found += parents.get(process, ())
    return found


def _thread(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread

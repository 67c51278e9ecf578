"""A run: what was started, where and when, how it ended, and the folder that holds its records.

runs/20260131-142530-train/
    run.json          this record; its end is filled in when the run is over
    plan.json         the plan (earlier ones: plan-1.json), and
    graph.json        the model it is for
    prediction.json   what a step was predicted to take, and
    profile.json      the figures of the devices behind that, where they were measured
    lab.json          the emulated devices, where there are any
    cluster.json      the real devices, where there are any, and what they had installed
    events-0.jsonl    one file per device: spans, memory, traffic, energy, the script's numbers
    vitals-0.jsonl    one file per real device: heat, throttling, memory
    log-0.txt         one file per device: the lines it printed
    checkpoints/0     one folder for each device that keeps checkpoints (tz.Run)
    report.html       made by terrazzo report
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.records import document
from terrazzo.records.machine import Machine

KIND, VERSION = "run", 1
RUNNING, DONE, FAILED, INTERRUPTED = "running", "done", "failed", "interrupted"
LEAST_FREE_BYTES = 64 << 20
"""A run that starts with less room would stop in the middle."""


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a training script on a number of devices."""

    name: str
    command: tuple[str, ...]
    devices: int
    machine: Machine
    began_s: float
    ended_s: float | None = None
    status: str = RUNNING
    failure: str = ""
    on: str = ""
    """Where, as ``--on`` says it."""

    @classmethod
    def begin(cls, name: str, command: Sequence[str], devices: int, *, on: str = "") -> Run:
        return cls(name, tuple(command), devices, Machine.here(), time.time(), on=on)

    def end(self, status: str, failure: str = "") -> Run:
        return replace(self, ended_s=time.time(), status=status, failure=failure)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.ended_s is None:
            return "still running, or cut off: its end was not recorded"
        words = f"{self.status} after {self.ended_s - self.began_s:.1f} s"
        return f"{words}: {self.failure.splitlines()[0]}" if self.failure else words

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        body = document.parse(text, KIND, VERSION)
        return cls(
            name=body["name"],
            command=tuple(body["command"]),
            devices=body["devices"],
            machine=Machine(**body["machine"]),
            began_s=body["began_s"],
            ended_s=body["ended_s"],
            status=body["status"],
            failure=body["failure"],
            on=body.get("on", ""),
        )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps its records."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str) -> RunFolder:
        """A new folder under ``parent``, named by the time and a short name."""
        short = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:24] or "run"
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{short}"
        for count in range(1, 1000):
            path = parent / (stem if count == 1 else f"{stem}-{count}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if parent.is_dir():
                    continue  # another run of the same second
                raise _no_folder(parent, NotADirectoryError(errno.ENOTDIR, "")) from None
            except OSError as error:
                raise _no_folder(path, error) from error
            return cls(path)._checked()
        raise UsageError(f"{parent} holds a thousand runs of this second; name another folder")

    @classmethod
    def take(cls, path: Path) -> RunFolder:
        """A folder the user named: new or empty, so that no run is overwritten."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"{path} is not empty; name a new folder for this run")
        except OSError as error:
            raise _no_folder(path, error) from error
        return cls(path)._checked()

    def _checked(self) -> RunFolder:
        """Room enough, and writable: better known now than after an hour of training."""
        free = shutil.disk_usage(self.path).free
        if free < LEAST_FREE_BYTES:
            raise UsageError(
                f"{self.path} has {free / 2**20:.0f} MiB free, a run may need "
                f"{LEAST_FREE_BYTES / 2**20:.0f} MiB: make room, or name another folder"
            )
        probe = self.path / ".probe"
        try:
            probe.write_bytes(bytes(4096))
            probe.unlink()
        except OSError as error:
            raise _no_folder(self.path, error) from error
        return self

    def file(self, name: str) -> Path:
        return self.path / name

    def write(self, run: Run) -> None:
        try:
            document.write(self.file("run.json"), run.to_json() + "\n")
        except OSError as error:
            raise _no_folder(self.path, error) from error

    def read(self) -> Run | None:
        """The record of the run; None in a folder that a script filled without a launcher."""
        try:
            text = self.file("run.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.file('run.json')} cannot be read: {error}") from error
        _same_version(self.path, text)
        try:
            return Run.from_json(text)
        except UsageError as error:
            raise UsageError(f"{self.file('run.json')}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self.file('run.json')} is damaged ({error!r})") from error

    @property
    def has_records(self) -> bool:
        """Whether any device wrote anything."""
        return any(path.stat().st_size for path in self.path.glob("*.jsonl"))

    @property
    def has_checkpoints(self) -> bool:
        """Whether any device has kept one here."""
        return any(self.path.glob("checkpoints/*/step-*"))

    def discard(self) -> None:
        """Removes a folder in which nothing was recorded, and its parent if that is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()


def _same_version(path: Path, text: str) -> None:
    try:
        body: Any = json.loads(text)
        version, maker = body["version"], body["machine"]["terrazzo"]
    except (ValueError, TypeError, KeyError):
        return  # parse says what is wrong with it
    if version != VERSION:
        raise UsageError(
            f"{path} was recorded by Terrazzo {maker} (run record version {version}); this one "
            f"reads version {VERSION}: report it with Terrazzo {maker}"
        )


def _no_folder(path: Path, error: OSError) -> UsageError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return UsageError(
        f"nothing can be recorded in {path}: {reason}. Name another folder with --run-dir, or "
        "run with --no-record"
    )

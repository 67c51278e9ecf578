"""The keeper: a device's state on disk before the first change, so that it is put back for sure.

A process that ends puts the state back itself. One that is killed can't; the next start finds its
file, sees that its owner is gone, and does it then. After a reboot the kernel has done it already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import KnobError, UsageError
from terrazzo.power.panel import Panel
from terrazzo.records import document

KIND, VERSION = "power state", 1
BOOT = Path("/proc/sys/kernel/random/boot_id")
SYSTEM_FOLDER = Path("/var/lib/terrazzo")


def usual_path(environment: Mapping[str, str]) -> Path:
    """For root a place of the system's, else one of the user's."""
    if os.geteuid() == 0:
        return SYSTEM_FOLDER / "power.json"
    home = environment.get("XDG_STATE_HOME") or ""
    folder = Path(home) if Path(home).is_absolute() else Path.home() / ".local/state"
    return folder / "terrazzo" / "power.json"


@dataclass(frozen=True, slots=True)
class Keeper:
    """The file that holds a device's state while somebody changes it."""

    path: Path

    def restore_left(self, panel: Panel) -> str:
        """Puts back what a process left that is gone; what was done, in words, or nothing."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise KnobError(f"saved power state {self.path} cannot be read: {error}") from error
        try:
            saved = document.parse(text, KIND, VERSION)
            owner, boot = (int(saved["process"]), str(saved["began"])), saved["boot"]
            files = [(str(name), str(value)) for name, value in saved["files"]]
        except (UsageError, KeyError, TypeError, ValueError) as error:
            raise KnobError(
                f"saved power state {self.path} is damaged ({error}): a reboot puts the device "
                "back; remove the file after it"
            ) from error
        if boot != _boot():
            self.path.unlink()
            return ""
        if owner[0] != os.getpid() and _began(owner[0]) == owner[1]:
            raise KnobError(
                f"process {owner[0]} is changing the power modes of this device: wait for it, or "
                "end it"
            )
        panel.restore(files)
        self.path.unlink()
        return f"put back what process {owner[0]} had left: {panel.read().text}"

    @contextmanager
    def borrowed(self, panel: Panel, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """While the block runs, modes may be changed; after it all is as before."""
        words = self.restore_left(panel)
        if words:
            say(words)
        files = panel.state()
        self._write(files)
        try:
            yield
        finally:
            panel.restore(files)
            self.path.unlink(missing_ok=True)

    def _write(self, files: list[tuple[str, str]]) -> None:
        body = {
            "process": os.getpid(),
            "began": _began(os.getpid()),
            "boot": _boot(),
            "files": [list(pair) for pair in files],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            document.write(self.path, document.dump(KIND, VERSION, body) + "\n")
            _sync(self.path)
            _sync(self.path.parent)
        except OSError as error:
            raise KnobError(
                f"the state of this device cannot be saved in {self.path} ({error}), so nothing is "
                "changed: make room there, or name another place"
            ) from error


def _sync(path: Path) -> None:
    """A device that loses its power now still has the file."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _boot() -> str:
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _began(process: int) -> str:
    """When a process began, so that another with its number is not taken for it."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]

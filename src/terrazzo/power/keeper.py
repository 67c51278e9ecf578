"""The keeper: a device's state on disk before the first change, so that it is put back for sure.

A process that ends puts the state back itself. One that is killed can't; the next start finds its
file, sees that its owner is gone, and does it then. After a reboot the kernel has done it already.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import KnobError, UsageError
from terrazzo.power.knob import Files
from terrazzo.power.panel import Panel
from terrazzo.records import document

KIND, VERSION = "power state", 1
BOOT = Path("/proc/sys/kernel/random/boot_id")
STATE = Path("/var/lib/terrazzo/power.json")
"""One place, whoever asks: what a helper of root's has left, an ordinary user must find."""


@dataclass(frozen=True, slots=True)
class Left:
    """A state on disk, and whose it is."""

    files: Files
    process: int
    is_alive: bool


@dataclass(frozen=True, slots=True)
class Keeper:
    """The file that holds a device's state while somebody changes it."""

    path: Path

    def left(self) -> Left | None:
        """What lies on disk of this boot; None: the device is as it was, nobody changes it."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
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
            return None
        alive = owner[0] != os.getpid() and _began(owner[0]) == owner[1]
        return Left(files, owner[0], alive)

    def restore_left(self, panel: Panel) -> str:
        """Puts back what a process left that is gone; what was done, in words, or nothing."""
        left = self.left()
        if left is None:
            with suppress(FileNotFoundError, NotADirectoryError):
                self.path.unlink()  # of an earlier boot: the kernel has put all back
            return ""
        if left.is_alive:
            raise KnobError(
                f"process {left.process} is changing the power modes of this device: wait for it, "
                "or end it"
            )
        panel.restore(left.files)
        self.path.unlink()
        return f"put back what process {left.process} had left: {panel.read().text}"

    @contextmanager
    def borrowed(
        self, panel: Panel, say: Callable[[str], None] = lambda _: None
    ) -> Iterator[Files]:
        """While the block runs, modes may be changed; after it all is as before.

        What was before is handed out, for who wants to go back to it meanwhile.
        """
        with self._alone():
            words = self.restore_left(panel)
            if words:
                say(words)
            capped = panel.capped_for_heat()
            if capped:
                raise KnobError(
                    f"{capped}: what its limits were before can't be seen until it is cooler, so "
                    "nothing is changed; wait, or cool it"
                )
            files = panel.state()
            self._write(files)
            files = panel.completed(files)
            self._write(files)
            try:
                yield files
            finally:
                with undisturbed():
                    panel.restore(files)
                    self.path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two that begin at once would each take the other's mode for the original."""
        path = self.path.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("a", encoding="ascii")
        except OSError as error:
            raise self._unsaved(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left = self.left()
                whose = f"process {left.process}" if left else "another process"
                raise KnobError(
                    f"{whose} is changing the power modes of this device: wait for it, or end it"
                ) from None
            yield

    def _unsaved(self, error: OSError) -> KnobError:
        return KnobError(
            f"the state of this device cannot be saved in {self.path} ({error}), so nothing is "
            "changed: make room there"
        )

    def _write(self, files: Files) -> None:
        body = {
            "process": os.getpid(),
            "began": _began(os.getpid()),
            "boot": _boot(),
            "files": [list(pair) for pair in files],
        }
        try:
            document.write(self.path, document.dump(KIND, VERSION, body) + "\n")
            _sync(self.path)
            _sync(self.path.parent)
        except OSError as error:
            raise self._unsaved(error) from error


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not cut in half what the first one began."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread alone
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


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

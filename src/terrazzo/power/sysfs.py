"""Files that are knobs: written, given time to take effect, and read back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import KnobError

SETTLE_S, TRIES = 0.005, 20


@dataclass(frozen=True, slots=True)
class Sysfs:
    """The files of a device under a root; ``pause`` lets time pass."""

    root: Path = Path("/")
    pause: Callable[[float], None] = time.sleep

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> str:
        try:
            return self.path(name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KnobError(f"knob {self.path(name)} cannot be read: {error}") from error

    def numbers(self, name: str) -> tuple[float, ...]:
        """All numbers of a file; none where there is no such file."""
        try:
            text = self.path(name).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return ()
        return tuple(float(word) for word in text.split() if word.replace(".", "").isdigit())

    def write(self, name: str, text: str) -> None:
        """Writes, and looks whether the kernel took it."""
        if self.read(name) == text:
            return
        path = self.path(name)
        try:
            path.write_text(text, encoding="ascii")
        except PermissionError as error:
            raise KnobError(
                f"knob {path} may not be written: changing power modes needs root; start the "
                "command with sudo, or let the helper do it (docs/power.md)"
            ) from error
        except OSError as error:
            raise KnobError(f"knob {path} refused {text}: {error.strerror or error}") from error
        for _ in range(TRIES):
            self.pause(SETTLE_S)
            seen = self.read(name)
            if seen == text:
                return
        raise KnobError(
            f"knob {path} was told {text} and says {seen}: something else holds it (a vendor's "
            "service, a limit, heat); stop that, or leave this knob alone"
        )

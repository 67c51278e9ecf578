"""The assistant: this side of a helper that runs with more rights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from terrazzo.errors import KnobError
from terrazzo.records.modes import Mode

HELPER = (sys.executable, "-m", "terrazzo.power.helper")
PATIENCE_S = 20.0


class Assistant:
    """A switch whose work is done by a helper process, which puts the device back when we go."""

    def __init__(self, command: Sequence[str] = ("sudo", "-n", *HELPER)) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._knobs: dict[str, tuple[float, ...]] = {}

    def __enter__(self) -> Assistant:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise KnobError(f"the power helper cannot be started: {error}") from error
        try:
            told = self._ask(do="knobs")["knobs"]
        except KnobError:
            self.close()
            raise
        self._knobs = {name: tuple(values) for name, values in told.items()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets the helper go, and waits until it has put the device back."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()  # by which it knows
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        process.stdout.close()

    @property
    def knobs(self) -> Mapping[str, tuple[float, ...]]:
        return self._knobs

    def read(self) -> Mode:
        return Mode.of(self._ask(do="read")["mode"])

    def apply(self, mode: Mode) -> None:
        self._ask(do="apply", mode=dict(mode.values))

    def _ask(self, **request: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # what it said before it went can still be read
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise KnobError(
                "the power helper has gone: changing modes needs root. Allow it without a "
                f"password (sudo -n {' '.join(HELPER)}), or start the command with sudo"
            )
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise KnobError(f"the power helper says: {line.strip()}") from None
        if "error" in answer:
            raise KnobError(answer["error"])
        return answer

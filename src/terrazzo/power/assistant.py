"""The assistant: this side of a helper that runs with more rights."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from terrazzo.errors import HelperGone, KnobError, PowerError
from terrazzo.records.modes import Mode

HELPER = (sys.executable, "-I", "-m", "terrazzo.power.helper")
"""-I: else Python would take the code of whatever lies in the current folder, as root."""
PATIENCE_S = 20.0
ANSWER_S = 60.0
"""All knobs of a device are set within a second or two."""


class Assistant:
    """A switch whose work is done by a helper process, which puts the device back when we go.

    One that stands ``apart`` is in a session of its own: what ends this process's whole group
    spares it, and it can still do so.
    """

    def __init__(
        self,
        command: Sequence[str] = ("sudo", "-n", *HELPER),
        *,
        apart: bool = False,
        answers_within_s: float = ANSWER_S,
    ) -> None:
        self._command, self._apart = tuple(command), apart
        self._answers_within_s = answers_within_s
        self._process: subprocess.Popen[str] | None = None
        self._knobs: dict[str, tuple[float, ...]] = {}

    def __enter__(self) -> Assistant:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=self._apart,
            )
        except OSError as error:
            raise KnobError(f"the power helper cannot be started: {error}") from error
        try:
            told = self._ask(do="knobs")["knobs"]
        except PowerError:
            with suppress(KnobError):  # the first is the one to tell
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
        self.close()  # raises where the device was not put back: that is the worse news

    def close(self) -> None:
        """Lets the helper go, and waits until it says that it has put the device back."""
        process = self._process
        if process is None:
            return
        self._process = None
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write('{"do": "leave"}\n')
            process.stdin.close()
        try:
            status: int | None = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            with suppress(PermissionError):  # what sudo started is root's
                process.terminate()
            status = None
        said = process.stdout.read().strip().rpartition("\n")[2] if status is not None else ""
        process.stdout.close()
        if status != 0:
            raise KnobError(
                f"the power helper {_ending(status)}{_problem(said)}: the device may not be as it "
                "was; terrazzo power restore puts it back"
            )

    @property
    def knobs(self) -> Mapping[str, tuple[float, ...]]:
        return self._knobs

    def read(self) -> Mode:
        return Mode.of(self._ask(do="read")["mode"])

    def apply(self, mode: Mode) -> None:
        self._ask(do="apply", mode=dict(mode.values))

    def restore(self) -> None:
        """The device as it was found; a governor that was at work is so again."""
        self._ask(do="restore")

    def _ask(self, **request: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # what it said before it went can still be read
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self._answers_within_s)[0]:
            raise HelperGone(
                f"the power helper has not answered for {self._answers_within_s:g} s: it hangs, or "
                "a knob does"
            )
        line = process.stdout.readline()
        if not line:
            raise HelperGone(
                "the power helper has gone: changing modes needs root. Allow it without a "
                f"password (sudo -n {' '.join(HELPER)}), or start the command with sudo"
            )
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise KnobError(f"the power helper says: {line.strip()}") from None
        if "error" in answer:
            refusal = KnobError(answer["error"])
            refusal.knob = str(answer.get("knob", ""))
            raise refusal
        return answer


def _ending(status: int | None) -> str:
    if status is None:
        return f"has not ended within {PATIENCE_S:g} s"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _problem(line: str) -> str:
    """What a helper's last line complains of."""
    try:
        told = json.loads(line)
    except json.JSONDecodeError:
        return ""
    return f" ({told['error']})" if isinstance(told, dict) and "error" in told else ""

"""Gears: the mode of a device while a training runs on it, and of each of its phases.

A change takes time. So a phase gets its own mode at once only if it lasted long enough the last
time it came, and else as soon as it has: then changing takes at most a hundredth of it.

    enter ── lasted long enough before ──▶ change
      └───── not known, or it did not ──▶ wait for it ──▶ change
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from terrazzo.errors import HelperGone, KnobError, PowerError
from terrazzo.records.modes import Mode
from terrazzo.records.seat import Seat

PART = 0.01
"""Of a phase's time: what going into its mode may take."""


class Borrowed(Protocol):
    """A device that is put back when it is closed."""

    def read(self) -> Mode: ...

    def apply(self, mode: Mode) -> None: ...

    def restore(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of modes: into which, how long it took, and why it came to nothing, if it did."""

    text: str
    took_s: float
    refusal: str = ""


class Gears:
    """Changes modes; one that a device refuses is not asked for again."""

    def __init__(
        self, device: Borrowed, seat: Seat, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock = device, clock
        self._mode, self._phases = seat.mode, dict(seat.phases)
        self._in: Mode | None = None
        self._phase, self._since_s = "", clock()
        self._stays: dict[str, float] = {}
        self._refused: set[Mode | None] = set()
        self._took_s = 0.0

    @property
    def phases(self) -> Mapping[str, Mode]:
        return self._phases

    def begin(self) -> Shift | None:
        """The mode for all that has none of its own; None: the device stays as it is."""
        return self._shift(self._mode)

    def enter(self, phase: str) -> Shift | None:
        """Another phase begins; None: nothing has changed, or not yet."""
        now_s = self._clock()
        self._stays[self._phase] = now_s - self._since_s
        self._phase, self._since_s = phase, now_s
        if self._stays.get(phase, 0.0) < self._pays_after_s:
            return None
        return self._shift(self._wanted)

    def go_on(self) -> Shift | None:
        """The phase goes on; long enough, and it gets its mode."""
        wanted = self._wanted
        if wanted == self._in or self._clock() - self._since_s < self._pays_after_s:
            return None
        return self._shift(wanted)

    @property
    def _wanted(self) -> Mode | None:
        return self._phases.get(self._phase, self._mode)

    @property
    def _pays_after_s(self) -> float:
        return self._took_s / PART

    def _shift(self, mode: Mode | None) -> Shift | None:
        if mode == self._in or mode in self._refused:
            return None
        begun_s, refusal = self._clock(), ""
        try:
            if mode is None:
                self._device.restore()
            else:
                self._device.apply(mode)
            self._in = mode
        except (KnobError, HelperGone) as error:
            self._refused.add(mode)
            refusal = str(error)
        took_s = self._clock() - begun_s
        self._took_s = max(self._took_s, took_s)
        return Shift(mode.text if mode else "as it was", took_s, refusal)

    def close(self) -> str:
        """Puts the device back; what went wrong with that, in words."""
        try:
            with suppress(HelperGone):
                self._device.close()
        except PowerError as error:
            return str(error)
        return ""

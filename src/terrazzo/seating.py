"""Seating: what the plan of a run says of this device takes effect on it, its power mode first."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from pathlib import Path

from terrazzo.errors import PowerError
from terrazzo.power.attendant import HERE, attended
from terrazzo.power.gears import Gears, Shift
from terrazzo.records import Plan
from terrazzo.records.seat import EVALUATION, Seat
from terrazzo.runtime.links import Links
from terrazzo.runtime.phase import PhaseWatch
from terrazzo.runtime.recorder import Recorder

PLAN = "TERRAZZO_PLAN"
"""The variable that holds the plan of a run as JSON, where ``terrazzo run`` was given one."""
PHASES = "TERRAZZO_PHASES"
"""The variable that is 1 where somebody follows the phases of a run in its record."""
KNOBS = "TERRAZZO_KNOBS"
"""The variable that names the folder in which this device's knobs are, where that is not /."""
PHASE, MODE, REFUSED = "phase: ", "mode: ", "mode refused: "
"""How notes begin that tell of phases and modes."""


def take_seat(links: Links, environment: Mapping[str, str], number: int) -> None:
    """Reads the plan that was handed over, if there is one, and puts this device into its mode.

    Where that is impossible the training goes on in the mode that the device is in.
    """
    if environment.get(PHASES) == "1" and links.recorder is not None:
        links.recorder.watch = links.recorder.watch or _told(links.recorder)
    text = environment.get(PLAN)
    if not text or links.given is not None:
        return
    links.given = Plan.from_json(text)
    seats = links.given.seats
    if number >= len(seats) or (seats[number].mode is None and not seats[number].phases):
        return
    seat, here = seats[number], int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if here > 1:
        if int(environment.get("LOCAL_RANK", "0")):
            return  # the first device of a machine sets it for all
        if len({(one.mode, one.phases) for one in seats}) > 1:
            _tell(links, seat, f"{here} devices share this machine, in different modes by the plan")
            return
    root = Path(environment.get(KNOBS) or HERE)
    try:
        gears = Gears(attended(root).__enter__(), seat)
    except PowerError as error:
        _tell(links, seat, str(error))
        return
    atexit.register(_close, gears)
    record(links, gears.begin())
    links.gears = gears
    if gears.phases:
        _follow_phases(links, gears)


def _told(recorder: Recorder) -> PhaseWatch:
    """Phases as notes that are written at once, those of evaluation with every call."""

    def enter(phase: str) -> None:
        recorder.note(PHASE + phase)
        recorder.flush()

    def go_on() -> None:
        if watch.phase == EVALUATION:
            enter(EVALUATION)

    watch = PhaseWatch(enter, go_on)
    return watch


def _follow_phases(links: Links, gears: Gears) -> None:
    """From now on every phase is in its own mode, where that pays."""
    recorder = links.recorder
    if recorder is None:
        _say("phases are known from what is recorded: without that, one mode is for all of them")
        return

    def enter(phase: str) -> None:
        recorder.note(PHASE + phase)
        record(links, gears.enter(phase))

    recorder.watch = PhaseWatch(enter, lambda: record(links, gears.go_on()))


def record(links: Links, shift: Shift | None) -> None:
    """A change of modes, in the record of the run; one that was refused also on the screen."""
    if shift is None:
        return
    recorder = links.recorder
    if shift.refusal:
        _say(f"not in mode {shift.text}: {shift.refusal}; training goes on in the mode it is in")
    if recorder is not None:
        name = f"{REFUSED}{shift.text}: {shift.refusal}" if shift.refusal else MODE + shift.text
        recorder.note(name, took_s=shift.took_s)


def _tell(links: Links, seat: Seat, reason: str) -> None:
    record(links, Shift(seat.mode.text if seat.mode else "of its phases", 0.0, reason))


def _close(gears: Gears) -> None:
    problem = gears.close()
    if problem:
        _say(problem)


def _say(words: str) -> None:
    print(f"terrazzo: {words}", file=sys.stderr)

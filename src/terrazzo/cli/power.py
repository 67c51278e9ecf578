"""``terrazzo power``: what a device can tell of its power, its modes, and which is best."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.tuning import add_tune
from terrazzo.cli.verb import add_verb
from terrazzo.errors import KnobError, UsageError
from terrazzo.meters import ina3221, nvml, pmic
from terrazzo.meters.busy import machine_busy_s
from terrazzo.meters.estimator import Calibration, kept
from terrazzo.meters.meter import BOARD, Meter, part_words, text_of
from terrazzo.meters.probe import Found, find
from terrazzo.meters.sampler import Sampler
from terrazzo.power.accelerator import memory_is_hidden
from terrazzo.power.assistant import Assistant
from terrazzo.power.keeper import STATE, Keeper
from terrazzo.power.panel import Panel
from terrazzo.power.presets import presets
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.event import Event, read_events
from terrazzo.records.modes import value_text
from terrazzo.records.power import (
    METER_FILE,
    calibration_path,
    parse_joules,
    parse_watts,
    watts_text,
)
from terrazzo.report.energy import ENERGY, METER
from terrazzo.report.screen import Screen

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  terrazzo power show
      what this device can measure, which knobs it has, how they stand
  terrazzo power tune train.py --objective energy --max-slowdown 1.2
      measure a few modes inside of the training, choose one, go on in it, put all back at the end
  terrazzo power tune --from table.csv --objective edp
      choose from measurements that you have, without any device
  terrazzo power calibrate --idle 2.7W --busy 6.3W
      what a USB meter shows while the device is idle, and with all cores at work
"""
LOOK_S = 1.0
STRETCH_S = 5.0
"""Of a run: the time of which a streamed meter gives one reading."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "power",
        help="measure energy, know the power modes, choose the best one",
        description="Measure the energy of devices, foretell time and power of their modes, and "
        "choose the one that suits.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = add_verb(verbs, "show", "tell what this device can measure and change")
    show.add_argument("--meter", type=Path, metavar="FILE", help="lines of an external meter")
    show.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help=argparse.SUPPRESS)
    show.set_defaults(command=show_power)
    add_tune(verbs)
    calibrate = add_verb(verbs, "calibrate", "teach the estimator what a real meter shows")
    calibrate.add_argument("--idle", metavar="WATTS", help="shown while the device is idle")
    calibrate.add_argument("--busy", metavar="WATTS", help="shown while all cores work")
    calibrate.add_argument("--run", type=Path, metavar="FOLDER", help="a recorded run, and")
    calibrate.add_argument(
        "--energy",
        metavar="JOULES",
        help="what the meter counted in it: 1.4Wh; not where it was streamed into the run",
    )
    calibrate.set_defaults(command=calibrate_power)
    restore = add_verb(verbs, "restore", "put back what a killed command has left")
    restore.set_defaults(command=restore_power)


# ---- show --------------------------------------------------------------------------------------


def show_power(options: argparse.Namespace) -> int:
    screen, root = Screen(), options.root
    sysfs = Sysfs(root)
    panel = Panel.find(sysfs)
    if root == Path("/"):
        _restore_left(panel, screen)
    model = text_of(root / "proc/device-tree/model")
    screen.line(f"power of {model or 'this device'}", "bold")
    _show_meters(options, screen)
    _show_knobs(panel, root, screen)
    _show_heat(root, screen)
    return 0


def _restore_left(panel: Panel, screen: Screen) -> None:
    """Root puts back what a killed command left; others are told how."""
    keeper = Keeper(STATE)
    try:
        left = keeper.left()
        if left is not None and not left.is_alive and os.geteuid() != 0:
            words = (
                f"process {left.process} was killed and left this device changed: terrazzo power "
                "restore puts it back"
            )
        else:
            words = keeper.restore_left(panel) if left is not None else ""
    except KnobError as error:
        words = str(error)
    if words:
        screen.line(words, "bold")


def _show_meters(options: argparse.Namespace, screen: Screen) -> None:
    told = kept(calibration_path(os.environ), options.root)
    found = find(
        options.root, calibration=told, external=options.meter, busy_s=machine_busy_s(options.root)
    )
    screen.title(f"Energy: {_how(found)}")
    with Sampler(found.used) as sampler:
        begun = sampler.begin()
        time.sleep(LOOK_S)
        taken = sampler.end(begun)
    for meter in found.used:
        off = "" if not meter.is_measured else f", taken to be off by up to {meter.error:.0%}"
        screen.line(f"{meter.name}: covers the {part_words([meter.covers])}{off}{_parts(meter)}")
    screen.line(f"now {watts_text(taken.mean_w)}{'' if found.is_measured else ' (estimated)'}")
    if not found.is_measured:
        screen.line(
            f"The estimate is {watts_text(told.idle_w)} and {watts_text(told.core_w)} for each "
            f"busy core ({told.source}); terrazzo power calibrate improves it.", "dim",
        )  # fmt: skip
    for meter in found.all:
        if meter not in found.used:
            screen.line(f"also there, not added: {meter.name}", "dim")
    for problem in found.problems:
        screen.line(f"not used: {problem}", "dim")


def _how(found: Found) -> str:
    if not found.is_measured:
        return "estimated, not measured"
    covers = [meter.covers for meter in found.used]
    if BOARD in covers:
        return "measured"
    return f"measured, but of the {part_words(dict.fromkeys(covers))} alone: the board draws more"


def _parts(meter: Meter) -> str:
    if not isinstance(meter, ina3221.Ina3221) or not meter.parts:
        return ""
    parts = ", ".join(f"{rail.label} {watts_text(rail.watts())}" for rail in meter.parts)
    return f"; parts of it: {parts}"


def _show_knobs(panel: Panel, root: Path, screen: Screen) -> None:
    screen.title("Knobs")
    if not panel.parts:
        screen.line(
            "This device shows none: no cpufreq, no devfreq, no cores to switch. A virtual machine "
            "and most containers have none; its modes are left as they are."
        )
        return
    if memory_is_hidden(Sysfs(root)):
        screen.line(
            "mem_hz: memory's clock is shown to root alone, by the kernel's own rule", "dim"
        )
    governors, mode = panel.governors, panel.read()
    for name, values in panel.knobs.items():
        low, high = value_text(name, values[0]), value_text(name, values[-1])
        governor = f", moved by {governors[name]}" if name in governors else ""
        screen.line(
            f"{name}: {low} to {high} in {len(values)} steps; now {value_text(name, mode[name])}"
            f"{governor}"
        )
    for preset in presets(root, panel.knobs):
        words = preset.mode.text if preset.mode else f"left alone: {preset.reason}"
        here = " (now)" if preset.mode == mode else ""
        screen.line(f"preset {preset.name}{here}: {words}")


def _show_heat(root: Path, screen: Screen) -> None:
    zones = []
    for path in sorted((root / "sys/class/thermal").glob("thermal_zone*/temp")):
        text, name = text_of(path), text_of(path.parent / "type") or path.parent.name
        if text.lstrip("-").isdigit() and -40_000 < int(text) < 200_000:
            zones.append(f"{name} {int(text) / 1e3:.0f}")
    cores = (root / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count")
    throttled = sum(int(text_of(path) or 0) for path in cores)
    words = [f"degrees C: {', '.join(zones)}"] if zones else []
    words += [f"cores were throttled for heat {throttled} times"] if throttled else []
    events = {
        path.name.partition("_")[0]: text_of(path)
        for path in sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt"))
    }
    words += [
        f"clocks were cut {count} times for too much current or heat ({name})"
        for name, count in events.items()
        if count not in ("", "0")
    ]
    words += pmic.throttling(root)
    words += nvml.heat() if root == Path("/") else []
    if words:
        screen.title("Heat")
        for text in words:
            screen.line(text)


# ---- calibrate, restore ------------------------------------------------------------------------


def calibrate_power(options: argparse.Namespace) -> int:
    """Two readings, or the energy of a run: then the estimator knows better."""
    screen, path = Screen(), calibration_path(os.environ)
    before = kept(path, Path("/"))
    readings: list[tuple[float, float]] = []
    if options.idle:
        readings.append((0.0, parse_watts(options.idle)))
    if options.busy:
        readings.append((float(os.cpu_count() or 1), parse_watts(options.busy)))
    if options.run is not None:
        readings += _run_readings(options.run, options.energy)
    if not readings:
        raise UsageError("no reading: say --idle 2.7W, --busy 6.3W, or --run FOLDER --energy 1.4Wh")
    told = Calibration.fit(readings, before=before)
    told.save(path)
    screen.line(
        f"idle {watts_text(told.idle_w)}, {watts_text(told.core_w)} for each busy core, off by up "
        f"to {told.error:.0%} (from {told.source}); kept in {path}"
    )
    if METER_FILE not in os.environ:
        screen.line(
            f"A meter that writes lines into a file measures runs itself: {METER_FILE}=FILE", "dim"
        )
    return 0


def _run_readings(folder: Path, energy: str | None) -> list[tuple[float, float]]:
    """Busy cores and watts in a run on this device, from what somebody read off a meter after it,
    or from the meter that was streamed into it."""
    for name, kind in (("lab.json", "emulated devices"), ("cluster.json", "other machines")):
        if (folder / name).exists():
            raise UsageError(
                f"{folder} was a run on {kind}: only a run of this device alone says what it draws"
            )
    events = list(read_events(folder)) if folder.is_dir() else []
    notes = [
        dict(e.values) | {"at_s": e.begin_s, "of": e.device} for e in events if e.name == ENERGY
    ]
    seconds = max((n["at_s"] for n in notes), default=0.0) - min(
        (n["at_s"] for n in notes), default=0.0
    )
    if seconds < 1:
        raise UsageError(f"{folder} holds no run of a second or more with notes of its energy")
    if energy is None:
        return _streamed(folder, events, notes)
    busy_s = 0.0
    for device in {note["of"] for note in notes}:
        own = [note.get("busy_s", 0.0) for note in notes if note["of"] == device]
        busy_s += max(own) - min(own)
    return [(busy_s / seconds, parse_joules(energy) / seconds)]


def _streamed(
    folder: Path, events: Sequence[Event], notes: Sequence[Mapping[str, float]]
) -> list[tuple[float, float]]:
    """One reading for each stretch of some seconds."""
    sources = [e for e in events if e.name.startswith(METER)]
    if len({note["of"] for note in notes}) != 1 or not all(
        dict(e.values).get("measured") and dict(e.values).get("whole") for e in sources
    ):
        raise UsageError(
            f"no meter of the whole board was read in {folder}, by one device alone: give --energy "
            f"too, what your meter counted in it (1.4Wh), or stream one in ({METER_FILE}=FILE)"
        )
    found: list[tuple[float, float]] = []
    begun = notes[0]
    for note in notes:
        seconds = note["at_s"] - begun["at_s"]
        if seconds >= STRETCH_S or (note is notes[-1] and not found and seconds > 0):
            busy_s, joules = (note[name] - begun[name] for name in ("busy_s", "joules"))
            found.append((busy_s / seconds, joules / seconds))
            begun = note
    return found


def restore_power(options: argparse.Namespace) -> int:
    screen, keeper = Screen(), Keeper(STATE)
    left = keeper.left()
    if left is None:
        screen.line("nothing to put back: no command left this device changed")
    elif os.geteuid() == 0 or left.is_alive:
        screen.line(keeper.restore_left(Panel.find(Sysfs())))
    else:
        with Assistant() as helper:  # which puts back as it begins
            words = helper.read().text
        screen.line(f"put back what process {left.process} had left: {words}")
    return 0

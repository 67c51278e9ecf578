"""The report in a terminal: the same findings as on the page, in as many columns as there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from terrazzo.errors import UsageError
from terrazzo.records.units import bytes_text, count_text, gap_text, loss_text, seconds_text
from terrazzo.report import canvas, png
from terrazzo.report.energyview import show_energy
from terrazzo.report.memory import Memory
from terrazzo.report.outcome import outcome
from terrazzo.report.outcomeview import show_outcome
from terrazzo.report.planview import GroupRow, PlanView, view
from terrazzo.report.plot import plot
from terrazzo.report.reading import Reading
from terrazzo.report.screen import Screen
from terrazzo.report.steps import CATEGORIES, mean_split
from terrazzo.report.verdict import verdict

MOST_PICTURES = 3


def show(reading: Reading, screen: Screen) -> None:
    """Prints what is known of a run."""
    run = reading.run
    screen.line(f"run {reading.title}", "bold")
    ending = run.ending if run else "started without terrazzo run, so its end is not known"
    screen.line(f"{count_text(reading.devices, 'device')}, {ending}")
    show_plan(view(reading.graph, reading.plan), screen)
    _losses(reading, screen)
    _numbers(reading, screen)
    _memory(reading, screen)
    _traffic(reading, screen)
    _time(reading, screen)
    if reading.energy is not None:
        show_energy(reading.energy, screen)
    _plans(reading, screen)
    _detections(reading, screen)
    ok, sentence = verdict(reading)
    if sentence:
        screen.line()
        screen.line(sentence, "bold green" if ok else "bold red")


def show_plan(shown: PlanView | None, screen: Screen) -> None:
    """The tiles over the input, and one row per group."""
    if shown is None:
        return
    batch, channels, *_ = shown.input_shape
    screen.title(f"Plan: {count_text(len(shown.groups), 'group')} of layers")
    screen.line(f"input {shown.height}x{shown.width}, {channels} channels, batch {batch}")
    if shown.is_tiled:
        for row in canvas.tiles(shown, width=screen.width):
            screen.raw(row, "cyan")
        halo = max(shown.halo(device) for device in range(shown.devices))
        screen.line(f"Each device reads up to {count_text(halo, 'pixel')} beyond its tile.")
    _groups(shown, screen)


def _groups(shown: PlanView, screen: Screen) -> None:
    """One row per group, under a drawing of how groups in one layout are cut."""
    groups = shown.groups
    if any(group.forward_bytes for group in groups):
        screen.line("Bytes are fetched from other devices before each group.", "dim")
    names = [group.title for group in groups]
    narrow = screen.width < 60
    wide = max(min(max(map(len, names)), screen.width - (16 if narrow else 36)), 8)
    dots = screen.shown("…")
    for place, (group, name) in enumerate(zip(groups, names, strict=True)):
        if not place or groups[place - 1].layout != group.layout:
            _layout(group, screen, drawn=place > 0 or not shown.is_tiled)
        short = name if len(name) <= wide else dots + name[len(dots) - wide :]
        row = f"{group.number:>3} {short:<{wide}} {bytes_text(group.forward_bytes):>9}"
        cut = f"  {group.cut}" if group.cut else ""
        screen.raw((row if narrow else f"{row}  {group.map_text}{cut}")[: screen.width], "dim")


def _layout(group: GroupRow, screen: Screen, *, drawn: bool) -> None:
    """How the map of a group is cut, with the numbers of the devices that make its parts."""
    if not group.boxes:
        screen.line(f"{group.layout}: every device makes all of it")
        return
    idle = [str(device) for device, box in enumerate(group.boxes) if box.is_empty]
    rest = f"; without device {', '.join(idle)}" if idle else ""
    screen.line(f"{group.layout}{rest}")
    for row in canvas.parts(group.boxes, width=screen.width) if drawn else ():
        screen.raw(row, "cyan")


def _losses(reading: Reading, screen: Screen) -> None:
    if not reading.losses:
        return
    alone = reading.alone.losses if reading.alone else {}
    screen.title("Loss")
    for row in plot(reading.losses, alone, width=min(screen.width, 72), height=12):
        screen.raw(row, "magenta")
    many = count_text(reading.devices, "device")
    if not alone:
        last = max(reading.losses)
        screen.line(f"x {many}; {loss_text(reading.losses[last])} at step {last}")
        return
    screen.keys("● both curves", f"x only {many}", "○ only one device")
    gaps = reading.loss_gaps
    if gaps:
        worst = max(gaps, key=lambda step: gaps[step])
        screen.line(f"largest relative gap {gap_text(gaps[worst])}, at step {worst}")
    if reading.comparison is not None:
        weights = reading.comparison
        screen.line(
            f"final weights differ by {gap_text(weights.weights_worst)} at most "
            f"({weights.tensors} tensors)"
        )


def _numbers(reading: Reading, screen: Screen) -> None:
    """What else the script logged: how it began, how it ended, and between what it lay."""
    rows = {name: curve for name, curve in reading.curves.items() if name != "loss"}
    if not rows:
        return
    screen.title("Other numbers the script logged")
    for name, curve in rows.items():
        first, last = loss_text(curve[min(curve)]), loss_text(curve[max(curve)])
        finite = [value for value in curve.values() if math.isfinite(value)]
        between = f", from {loss_text(min(finite))} to {loss_text(max(finite))}" if finite else ""
        screen.line(f"{name}: {first} at first, {last} at step {max(curve)}{between}")


def _memory(reading: Reading, screen: Screen) -> None:
    if not reading.memory:
        return
    rows = [("one device", memory) for memory in (reading.alone.memory if reading.alone else ())]
    rows += [(f"device {memory.device}", memory) for memory in reading.memory]
    has_idle = all(memory.idle_bytes for _, memory in rows)
    screen.title("Memory per device: the peak while training")
    amounts = {
        label: {
            "█": memory.steps_bytes,
            "▒": memory.own_bytes - memory.steps_bytes,
            "░": memory.idle_bytes,
        }
        for label, memory in rows
    }
    texts = {
        label: f"{bytes_text(memory.own_bytes)} of {bytes_text(memory.peak_bytes)}"
        if has_idle
        else bytes_text(memory.peak_bytes)
        for label, memory in rows
    }
    _bars(amounts, texts, screen)
    if has_idle:
        screen.keys("█ steps", "▒ model, plan, what export left", "░ the idle process", style="dim")
    if reading.alone and reading.alone.memory and has_idle:
        screen.line(_less(reading.alone.memory[0], reading.memory))


def _less(alone: Memory, many: Sequence[Memory]) -> str:
    """How one device alone compares; device 0, which exports the model, is the largest."""
    own = sorted(alone.own_bytes / max(memory.own_bytes, 1.0) for memory in many)
    all_ = sorted(alone.peak_bytes / max(memory.peak_bytes, 1.0) for memory in many)
    return (
        f"One device alone takes {_range(own)} times as much beyond the idle process, "
        f"{_range(all_)} times with it."
    )


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"
    return low if low == high else f"{low} to {high}"


def _bars(
    amounts: Mapping[str, Mapping[str, float]], texts: Mapping[str, str], screen: Screen
) -> None:
    """Rows of block characters on one scale."""
    top = max((sum(parts.values()) for parts in amounts.values()), default=0.0) or 1.0
    label_wide = max(map(len, amounts))
    room = screen.width - label_wide - max(map(len, texts.values())) - 3
    room = min(room, 40)
    for label, parts in amounts.items():
        drawn, ends = "", 0.0
        for block, size in parts.items():
            ends += size
            drawn += block * (round(ends / top * room) - len(drawn))
        bar = f"{drawn:<{room}} " if room >= 6 else ""
        screen.raw(f"{label:<{label_wide}} {bar}{texts[label]}")


def _traffic(reading: Reading, screen: Screen) -> None:
    rows = {device: sent for device, sent in reading.sent_bytes.items() if sent}
    if not rows:
        return
    screen.title("Bytes sent per device and step")
    amounts = {f"device {device}": {"█": sum(sent.values())} for device, sent in rows.items()}
    words = {"exchange": "maps", "sum": "sums"}
    texts = {}
    for device, sent in rows.items():
        parts = [f"{words.get(kind, kind)} {bytes_text(size)}" for kind, size in sent.items()]
        total = bytes_text(sum(sent.values()))
        texts[f"device {device}"] = total if screen.width < 60 else f"{total} ({', '.join(parts)})"
    _bars(amounts, texts, screen)


def _time(reading: Reading, screen: Screen) -> None:
    if not reading.settled:
        return
    rows = {}
    if reading.alone and reading.alone.settled:
        rows["one device"] = mean_split(reading.alone.settled, 0)
    rows |= {
        f"device {device}": mean_split(reading.settled, device) for device in range(reading.devices)
    }
    screen.title("Where the time of a step goes")
    for label, split in rows.items():
        total = sum(split.values())
        shares = [
            f"{kind} {split[kind] / total:.0%}"
            for kind in CATEGORIES
            if total and split[kind] / total >= 0.005
        ]
        screen.line(f"{label}: {seconds_text(total)} = {', '.join(shares)}")
    cores = reading.run.machine.cores if reading.run else 0
    if 0 < cores < reading.devices:
        screen.line(
            f"The {reading.devices} devices share {count_text(cores, 'core')} here: times say "
            "little about devices of their own, memory and bytes do not depend on it.",
            "dim",
        )


def _plans(reading: Reading, screen: Screen) -> None:
    """How the plan came out, and when there was another."""
    found = outcome(reading)
    if found is not None:
        show_outcome(found, screen)
    if reading.plan_changes:
        calls = ", ".join(map(str, reading.plan_changes))
        screen.line(f"Plans were changed after call {calls}; what is shown is the last.")


def _detections(reading: Reading, screen: Screen) -> None:
    if reading.detections is None or not reading.detections.scenes:
        return
    screen.title("Detections")
    scenes = reading.detections.scenes[:MOST_PICTURES]
    if screen.pictures:
        wide = min((screen.width - 2 * len(scenes)) // len(scenes), 32)
        found = []
        for scene in scenes:
            try:
                pixels = png.decode((reading.path / scene.picture).read_bytes())
            except (OSError, UsageError):
                continue
            found.append(canvas.drawn(pixels, scene, width=wide))
        for row in canvas.half_blocks(found) if found else ():
            screen.text(row)
    for number, scene in enumerate(scenes, start=1):
        names = ", ".join(f"{mark.label} {mark.score:.0%}" for mark in scene.found) or "nothing"
        true = ", ".join(mark.label for mark in scene.true) or "nothing"
        screen.line(f"picture {number}: found {names}; there is {true}")
    if reading.detections.caption:
        screen.line(reading.detections.caption, "dim")

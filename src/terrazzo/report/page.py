"""The page: one HTML file that needs nothing but itself."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from importlib import resources

from terrazzo.records.run import Run
from terrazzo.records.units import bytes_text, count_text, gap_text, loss_text, seconds_text
from terrazzo.report import pictures
from terrazzo.report.charts import (
    Axis,
    Bar,
    Curve,
    bar_chart,
    line_chart,
    linear_axis,
    log_axis,
)
from terrazzo.report.energyview import energy_section
from terrazzo.report.outcome import outcome
from terrazzo.report.outcomeview import outcome_table
from terrazzo.report.planview import PlanView, view
from terrazzo.report.reading import Reading
from terrazzo.report.steps import CATEGORIES, mean_split
from terrazzo.report.svg import Markup, join, tag
from terrazzo.report.timeline import timelines
from terrazzo.report.verdict import facts, verdict

KIND_WORDS = {
    "compute": "compute",
    "exchange": "exchange of maps",
    "sum": "norms and sums",
    "agree": "agreement",
    "feed": "feed",
    "waiting": "waiting for others",
    "other": "the rest: data, loss, optimiser, what is not recorded",
}


def page(reading: Reading) -> str:
    """The whole document."""
    shown = view(reading.graph, reading.plan)
    sections = [
        _losses(reading),
        _numbers(reading),
        _plan(reading, shown),
        _memory(reading),
        _time(reading),
        _energy(reading),
        _outcome(reading),
        _traffic(reading),
        _timeline(reading),
        _detections(reading),
        _origin(reading),
    ]
    style, script = (
        resources.files("terrazzo.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Terrazzo run {reading.title}"),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", _header(reading), *filter(None, sections)))
    script_tag = tag("script", Markup(script))
    return f'<!doctype html>\n<html lang="en">{head}{body}{script_tag}</html>\n'


def _section(title: str, *parts: str) -> Markup:
    return tag("section", tag("h2", title), *parts)


def _header(reading: Reading) -> Markup:
    run = reading.run
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began_s)) if run else ""
    ending = run.ending if run else "started without terrazzo run, so its end is not known"
    what = f"{count_text(reading.devices, 'device')}, {when}, {ending}".replace(", ,", ",")
    ok, sentence = verdict(reading)
    colour = {True: "good", False: "bad", None: "quiet"}[ok]
    tiles = [
        tag("div", tag("b", fact.value), tag("span", fact.words), class_="fact")
        for fact in facts(reading)
    ]
    return tag(
        "header",
        tag("h1", f"Terrazzo run {reading.title}"),
        tag("p", what, class_="quiet"),
        tag("p", tag("strong", sentence, class_=colour)) if sentence else "",
        tag("div", *tiles, class_="facts"),
    )


def _losses(reading: Reading) -> Markup | None:
    if not reading.losses:
        return None
    own = list(reading.losses.items())
    many = Curve(count_text(reading.devices, "device"), "many", own)
    curves = [many]
    if reading.alone and reading.alone.losses:
        curves.insert(0, Curve("one device", "one", list(reading.alone.losses.items())))
    x = linear_axis([float(step) for curve in curves for step, _ in curve.points], most=6)
    y = linear_axis([loss for curve in curves for _, loss in curve.points], from_zero=True)
    chart = line_chart(curves, x=x, y=y, x_title="step", y_title="loss")
    gaps = reading.loss_gaps
    if not gaps:
        return _section("Loss", chart)
    worst = max(gaps, key=lambda step: gaps[step])
    words = (
        f"The largest relative gap between the curves is {gap_text(gaps[worst])}, at step {worst}. "
        "In float64 only the order of sums differs, so rounding is all that may be left."
    )
    return _section("Loss: both curves lie on each other", tag("p", words), chart, _gaps(gaps, x))


def _numbers(reading: Reading) -> Markup | None:
    """What else the script logged, each on a scale of its own."""
    names = [name for name in reading.curves if name != "loss"]
    if not names:
        return None
    charts = []
    for name in names:
        points = [(float(step), value) for step, value in reading.curves[name].items()]
        last, value = points[-1]
        curve = Curve(f"{loss_text(value)} at step {last:g}", "many", points)
        x = linear_axis([step for step, _ in points], most=6)
        y = linear_axis([value for _, value in points], most=3)
        charts.append(line_chart([curve], x=x, y=y, x_title="step", y_title=name, height=90))
    return _section("Other numbers the script logged", tag("div", *charts, class_="numbers"))


def _gaps(gaps: dict[int, float], x: Axis) -> Markup:
    """Powers of ten; the very same bits lie on the floor."""
    floor = -17
    points = [
        (float(step), math.log10(gap) if gap > 10.0**floor else float(floor))
        for step, gap in gaps.items()
    ]
    top = max(-9, math.ceil(max((value for _, value in points), default=-9)))
    return line_chart(
        [Curve("relative gap", "many", points)],
        x=x,
        y=log_axis(floor, top, 2),
        x_title="step",
        y_title="relative gap between the two losses",
        height=110,
        limit=(-10.0, "the promise: 1e-10"),
    )


def _plan(reading: Reading, shown: PlanView | None) -> Markup | None:
    if shown is None:
        return None
    picture = None
    if reading.detections and reading.detections.scenes:
        picture = pictures.data_uri(reading.path / reading.detections.scenes[0].picture)
    batch, channels, *_ = shown.input_shape
    halos = [shown.halo(device) for device in range(shown.devices)]
    caption = (
        f"The input, {shown.height} by {shown.width} with {channels} channels, batch {batch}. "
        f"A device owns a tile (solid) and reads up to {count_text(max(halos), 'pixel')} "
        "beyond it (dashed)."
    )
    layouts = list(dict.fromkeys(group.layout for group in shown.groups))
    title = f"Plan: {count_text(len(shown.groups), 'group')} of layers"
    if len(layouts) == 1:
        title += f", {layouts[0]}"
    figure = tag(
        "figure", pictures.tiles_over_input(shown, picture), tag("figcaption", caption),
        style="margin:0",
    )  # fmt: skip
    table = tag("div", _group_table(shown, layouts=len(layouts) > 1), class_="wide")
    return _section(title, tag("div", figure, table, class_="plan"))


def _group_table(shown: PlanView, *, layouts: bool) -> Markup:
    heads = [("", "number"), ("layers", None), ("map it makes", "number"),
             ("fetched from others", "number")]  # fmt: skip
    if layouts:
        heads.insert(2, ("layout", None))
    rows = [tag("tr", *(tag("th", words, class_=kind) for words, kind in heads))]
    for group in shown.groups:
        cells = [
            tag("td", str(group.number), class_="number"),
            tag("td", _breakable(group.title), class_="free"),
            tag("td", f"{group.layout}: {group.cut}" if group.cut else group.layout)
            if layouts
            else "",
            tag("td", group.map_text.replace("x", "×"), class_="number"),
            tag("td", bytes_text(group.forward_bytes), class_="number"),
        ]
        rows.append(tag("tr", *cells))
    return tag("table", *rows)


def _breakable(name: str) -> Markup:
    """Long names of layers may break after a dot."""
    parts = [part for word in name.split(".") for part in (word, ".", Markup("<wbr>"))]
    return join(*parts[:-2])


def _memory(reading: Reading) -> Markup | None:
    if not reading.memory:
        return None
    alone = reading.alone.memory if reading.alone else ()
    rows = [("one device", "one", memory) for memory in alone]
    rows += [(f"device {memory.device}", "many", memory) for memory in reading.memory]
    bars = [
        Bar(
            label,
            {
                "idle": memory.idle_bytes,
                "setup": memory.own_bytes - memory.steps_bytes,
                kind: memory.steps_bytes,
            },
            f"{bytes_text(memory.own_bytes)} of {bytes_text(memory.peak_bytes)}"
            if memory.idle_bytes
            else bytes_text(memory.peak_bytes),
        )
        for label, kind, memory in rows
    ]
    keys = [("many", f"training on {count_text(reading.devices, 'device')}")]
    if alone:
        keys.insert(0, ("one", "training on one device"))
    if any(memory.idle_bytes for _, _, memory in rows):
        keys.append(("setup", "ready to train: the model, the plan, what export left"))
        keys.append(("idle", "the idle process: Python, torch, connections"))
    words = "The largest resident size of each process while it trained"
    words += ", beyond the idle process and in all." if len(keys) > 2 else "."
    setup = max((memory.setup_bytes for _, _, memory in rows), default=0.0)
    later = f"Setting up peaked at {bytes_text(setup)}, on a device that exports the model."
    return _section(
        "Memory per device",
        tag("p", words),
        bar_chart(bars, keys=keys),
        tag("p", later, class_="quiet") if setup else "",
    )


def _time(reading: Reading) -> Markup | None:
    steps = reading.settled
    if not steps:
        return None
    rows = []
    if reading.alone and reading.alone.settled:
        rows.append(("one device", mean_split(reading.alone.settled, 0)))
    rows += [(f"device {device}", mean_split(steps, device)) for device in range(reading.devices)]
    bars = [Bar(label, split, seconds_text(sum(split.values()))) for label, split in rows]
    used = [kind for kind in CATEGORIES if any(split[kind] > 0 for _, split in rows)]
    words = (
        f"An average step after the first, over {count_text(len(steps), 'step')}. Waiting is the "
        "part of an exchange or a sum before the last device arrived."
    )
    return _section(
        "Where the time goes",
        tag("p", words, _shared_cores(reading)),
        bar_chart(bars, keys=[(kind, KIND_WORDS[kind]) for kind in used]),
    )


def _energy(reading: Reading) -> Markup | None:
    found = reading.energy
    return None if found is None else _section(f"Energy{found.mark}", *energy_section(found))


def _outcome(reading: Reading) -> Markup | None:
    found = outcome(reading)
    return None if found is None else _section("Predicted and measured", outcome_table(found))


def _shared_cores(reading: Reading) -> str:
    """Local devices compete for cores: their times say little about machines of their own."""
    cores = reading.run.machine.cores if reading.run else 0
    if not 0 < cores < reading.devices:
        return ""
    return (
        f" The {reading.devices} devices share {count_text(cores, 'core')} here, so these times "
        "say little about devices with cores of their own; memory and bytes do not depend on that."
    )


def _traffic(reading: Reading) -> Markup | None:
    rows = reading.sent_bytes
    if reading.devices == 1 or not any(rows.values()):
        return None
    kinds = [kind for kind in CATEGORIES if any(kind in sent for sent in rows.values())]
    bars = [
        Bar(
            f"device {device}",
            {kind: sent.get(kind, 0.0) for kind in kinds},
            bytes_text(sum(sent.values())),
        )
        for device, sent in rows.items()
    ]
    return _section(
        "Bytes sent per step",
        tag("p", "Payload of one training step. Edges of maps, their gradients and pictures go to "
            "the devices that need them; of statistics and weight gradients, which are summed "
            "over all devices, the size is shown."),
        bar_chart(bars, keys=[(kind, KIND_WORDS[kind]) for kind in kinds]),
    )  # fmt: skip


def _timeline(reading: Reading) -> Markup | None:
    if not reading.steps:
        return None
    keys = [(kind, words) for kind, words in KIND_WORDS.items() if kind not in ("other", "feed")]
    legend = [tag("span", tag("i", class_=f"key {kind}"), words) for kind, words in keys]
    return _section(
        "Timeline",
        tag("p", "Each bar is a span of work; gaps are the rest. Point at one to read it. Zoom "
            "with the buttons or Ctrl and the wheel, then scroll sideways."),
        tag("div", *legend, class_="keys"),
        timelines(reading.steps),
    )  # fmt: skip


def _detections(reading: Reading) -> Markup | None:
    found = reading.detections
    if found is None:
        return None
    shown = []
    for scene in found.scenes:
        picture = pictures.data_uri(reading.path / scene.picture)
        if picture is not None:
            shown.append(pictures.scene(picture, scene))
    if not shown:
        return None
    words = "What the trained network finds, with its score. Dotted: what is there. "
    words += found.caption
    return _section("Detections", tag("p", words), tag("div", *shown, class_="scenes"))


def _origin(reading: Reading) -> Markup:
    """What a published number must carry."""
    run = reading.run
    rows = [("folder", str(reading.path))]
    if run is not None:
        rows += _machine_rows(run)
    if reading.losses:
        last = max(reading.losses)
        rows.append(("last loss", f"{loss_text(reading.losses[last])} at step {last}"))
    files = sorted(path.name for path in reading.path.iterdir() if not path.name.startswith("."))
    rows.append(("records", ", ".join(files)))
    cells = [
        tag("tr", tag("th", name), tag("td", tag("code", text), class_="free"))
        for name, text in rows
    ]
    return _section("Where these numbers come from", tag("table", *cells))


def _machine_rows(run: Run) -> Sequence[tuple[str, str]]:
    machine = run.machine
    return [
        ("command", shlex.join(run.command)),
        ("machine", f"{machine.processor}, {count_text(machine.cores, 'core')}, "
                    f"{bytes_text(machine.memory_bytes)} of memory, {machine.system}"),
        ("versions", f"Terrazzo {machine.terrazzo}, torch {machine.torch}, "
                     f"Python {machine.python}"),
    ]  # fmt: skip

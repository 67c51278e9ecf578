"""A timeline: the spans of one step, one row per device, for a page that zooms and scrolls."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.records.event import Event
from terrazzo.records.units import bytes_text, seconds_text
from terrazzo.report.steps import Step
from terrazzo.report.svg import Markup, percent, tag
from terrazzo.report.ticks import ticks

ROW_PX, GAP_PX, AXIS_PX = 26, 8, 20
MOST_SPANS = 4000
"""More would make the page slow; the shortest are left out, and the page says so."""


def chosen_steps(steps: Sequence[Step]) -> list[tuple[str, Step]]:
    """A usual step, the slowest and the first: what one wants to look at."""
    whole = [step for step in steps if step.is_whole] or list(steps)
    if not whole:
        return []
    later = whole[1:] or whole
    ordered = sorted(later, key=lambda step: step.seconds)
    picks = [("usual", ordered[len(ordered) // 2]), ("slowest", ordered[-1]), ("first", whole[0])]
    found: dict[int, tuple[str, Step]] = {}
    for name, step in picks:
        found.setdefault(step.call, (name, step))
    return list(found.values())


def timelines(steps: Sequence[Step]) -> Markup:
    """All chosen steps, the first one shown; page.js switches, zooms and explains."""
    picks = chosen_steps(steps)
    buttons = [
        tag(
            "button", f"{name}: step {step.call}, {seconds_text(step.seconds)}",
            type="button", data_step=str(number), aria_pressed="true" if number == 0 else "false",
        )
        for number, (name, step) in enumerate(picks)
    ]  # fmt: skip
    zooms = [
        tag("button", "\N{MINUS SIGN}", type="button", data_zoom="0.5", aria_label="zoom out"),
        tag("button", "+", type="button", data_zoom="2", aria_label="zoom in"),
    ]
    views = [
        _timeline(step, number=number, hidden=number > 0) for number, (_, step) in enumerate(picks)
    ]
    return tag(
        "div",
        tag("div", *buttons, tag("span", *zooms, class_="zoom"), class_="tools"),
        *views,
        tag("div", class_="told", hidden="hidden"),
        class_="timelines",
    )


def _timeline(step: Step, *, number: int, hidden: bool) -> Markup:
    spans = sorted(step.spans, key=lambda span: span.seconds, reverse=True)
    left_out = spans[MOST_SPANS:]
    height = AXIS_PX + step.devices * (ROW_PX + GAP_PX)
    rects = [rect for span in spans[:MOST_SPANS] for rect in _rects(step, span)]
    names = [
        tag("div", f"device {device}", style=f"top:{_top(device)}px;height:{ROW_PX}px")
        for device in range(step.devices)
    ]
    drawing = tag(
        "svg", *_phases(step, height), *rects, *_axis(step, height), height=height,
        data_seconds=f"{step.seconds:.6f}",
    )  # fmt: skip
    return tag(
        "div",
        tag("div", *names, class_="names"),
        tag("div", drawing, class_="scroll", tabindex="0"),
        tag("p", f"The shortest {len(left_out)} spans are left out.") if left_out else "",
        class_="timeline",
        data_view=str(number),
        hidden="hidden" if hidden else None,
    )


def _top(device: int) -> int:
    return AXIS_PX + device * (ROW_PX + GAP_PX)


def _phases(step: Step, height: int) -> list[Markup]:
    """Where backward begins: a quiet line and two words."""
    turns = [span.begin_s for span in step.spans if span.phase == "backward"]
    if not turns:
        return []
    at = percent((min(turns) - step.begin_s) / step.seconds)
    return [
        tag("line", x1=at, x2=at, y1=0, y2=height, class_="turn"),
        tag("text", "backward", x=at, dx=4, y=height - 1, class_="phase"),
        tag("text", "forward", x=0, y=height - 1, class_="phase"),
    ]


def _rects(step: Step, span: Event) -> list[Markup]:
    """A span, with the part it waited drawn apart."""
    waited = step.waiting_s.get(span, 0.0)
    story = tag("title", _story(span, waited))
    parts = [
        ("waiting", span.begin_s, waited),
        (span.kind, span.begin_s + waited, span.seconds - waited),
    ]
    return [
        tag(
            "rect",
            story,
            class_=kind,
            x=percent((begin_s - step.begin_s) / step.seconds),
            y=_top(span.device),
            width=percent(length_s / step.seconds),
            height=ROW_PX,
        )
        for kind, begin_s, length_s in parts
        if length_s > 0
    ]


def _story(span: Event, waited_s: float) -> str:
    words = [f"device {span.device}, {span.phase}: {span.kind}, {span.name}"]
    words.append(seconds_text(span.seconds))
    if waited_s > 0:
        words.append(f"{seconds_text(waited_s)} of it waiting")
    if span.bytes:
        words.append(f"{bytes_text(span.bytes)} sent")
    return " · ".join(words)


def _axis(step: Step, height: int) -> list[Markup]:
    """Times since the step began; page.js makes finer ones when it zooms."""
    marks = ticks(0.0, step.seconds, 6)
    return [
        tag(
            "g",
            *(
                tag("text", seconds_text(mark), x=percent(mark / step.seconds), y=11)
                for mark in marks
                if mark < 0.95 * step.seconds
            ),
            class_="ticks",
        )
    ]

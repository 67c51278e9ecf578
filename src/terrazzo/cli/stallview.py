"""A diagnosis of stalls on a screen and on a page: tables, and a timeline of stages over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources

from terrazzo.feed.advice import NONE
from terrazzo.feed.diagnosis import Diagnosis, Seen
from terrazzo.feed.stalls import FedStep
from terrazzo.records.trial import USUAL
from terrazzo.records.units import bytes_text, count_text, seconds_text
from terrazzo.report.lanes import MARKS, WORDS, Timeline, picture, rows, timeline
from terrazzo.report.screen import Screen
from terrazzo.report.svg import Markup, tag

DRAWN_STEPS = 4
BAR = 20
ALIKE = 0.02
"""Steps that differ by less count as equal."""
ELSEWHERE = "The same data elsewhere, by usual figures of such media"
RECOMMENDED = "Recommended, as options of tz.feed where they have a name"


def show(found: Diagnosis, seen: Mapping[str, Seen], screen: Screen, *, title: str) -> None:
    usual = found.usual
    screen.line(f"{title}: {_set_up(found)}", "bold")
    screen.title(f"Of a step of {seconds_text(usual.step_s)}")
    for what, seconds in usual.parts:
        share = seconds / usual.step_s
        bar = "█" * round(BAR * share)
        screen.raw(f"{what:<28}{seconds_text(seconds):>9}{share:>6.0%}  {bar}".rstrip())
    screen.line(_difference(found), "dim")
    if found.doubt:
        screen.line(_warning(found), "yellow")
    screen.title(_limit(found))
    screen.line(_why(found))
    _timeline(seen[USUAL].steps, screen)
    if found.advice.gains:
        screen.title("What if")
    for name, step_s, words in gains(found):
        screen.raw(f"{name:<44}{seconds_text(step_s):>9}  {words}")
    if found.advice.media:
        screen.title(ELSEWHERE)
        for name, workers, step_s in found.advice.media:
            word = _workers(workers)
            screen.raw(f"{name:<20}{word:<12}{seconds_text(step_s):>9}")
        screen.line(cheaper(found))
    screen.title(RECOMMENDED)
    for setting in found.advice.settings:
        screen.line(setting)


def _set_up(found: Diagnosis) -> str:
    usual, facts = found.usual, found.facts
    who = _workers(usual.workers)
    size = f" of {bytes_text(facts.stored_bytes)}" if facts.stored_bytes else ""
    cores = f"{found.pipeline.cores:.3g} {'core' if found.pipeline.cores == 1 else 'cores'}"
    return f"{facts.batch:g} samples{size} a step; {who}, {cores}; {usual.steps} steps measured"


def _workers(count: int) -> str:
    return count_text(count, "worker") if count else "no workers"


def _difference(found: Diagnosis) -> str:
    """The other way to the same answer."""
    off = found.predicted_s / found.usual.step_s - 1
    same, warm, cold = map(seconds_text, (found.synthetic_s, found.warm_s, found.cold_s))
    prepare, fetch = map(seconds_text, (found.prepare_stall_s, found.fetch_stall_s))
    return (
        f"By difference, batches made in the loop: {same} with the same batch again and again, "
        f"{warm} with files in memory (pre-processing {prepare}), {cold} with files from storage "
        f"(fetch {fetch}). From these a step as it is set up should take "
        f"{seconds_text(found.predicted_s)} ({off:+.0%})."
    )


def _warning(found: Diagnosis) -> str:
    """What to make of trials that do not agree."""
    return (
        f"These numbers do not agree: {found.doubt}. Something else may have used this computer: "
        "run it again when that is over, or for more steps (--steps)."
    )


def _limit(found: Diagnosis) -> str:
    return f"Limit: {found.advice.limit}" if found.advice.limit != NONE else "No limit here"


def _why(found: Diagnosis) -> str:
    return f"{found.advice.why[0].upper()}{found.advice.why[1:]}."


def gains(found: Diagnosis) -> list[tuple[str, float, str]]:
    """Changes, and how much less of a step they would leave."""
    now_s = found.predicted_s
    rows = []
    for gain in found.advice.gains:
        less = 1 - gain.step_s / now_s
        if less > ALIKE:
            words = f"{less:.0%} less"
        elif less < -ALIKE:
            words = f"{-less:.0%} more"
        else:
            words = "no change"
        rows.append((gain.change, gain.step_s, words))
    return rows


def cheaper(found: Diagnosis) -> str:
    """Whether a cheaper medium with more workers does as well as the dearest."""
    *others, dearest = found.advice.media
    name, workers, best_s = dearest
    for other, count, step_s in others:
        if step_s <= best_s * (1 + ALIKE):
            return (
                f"{other} with {_workers(count)} would do as well as {name} with "
                f"{_workers(workers)}."
            )
    return f"No cheaper medium would do as well as {name}, however many workers read it."


def _drawn(steps: Sequence[FedStep]) -> Timeline:
    """Some steps in the middle of the second half."""
    first = max(0, len(steps) * 3 // 4 - DRAWN_STEPS // 2)
    chosen = steps[first : first + DRAWN_STEPS]
    return timeline(
        [span for step in steps for span in step.spans],
        steps=[(number, step.begin_s) for number, step in enumerate(chosen, first + 1)],
        end_s=chosen[-1].end_s,
    )


def _over_steps(drawn: Timeline) -> str:
    return f"{count_text(len(drawn.steps), 'step')}, {seconds_text(drawn.length_s)}"


def _timeline(steps: Sequence[FedStep], screen: Screen) -> None:
    drawn = _drawn(steps)
    screen.title(_over_steps(drawn))
    for row in rows(drawn, width=min(screen.width, 100)):
        screen.raw(row)
    screen.keys(*(f"{MARKS[kind]} {WORDS[kind]}" for kind in drawn.kinds), style="dim")


def page(found: Diagnosis, seen: Mapping[str, Seen], *, title: str) -> str:
    """One HTML file that needs nothing but itself."""
    style = resources.files("terrazzo.report").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Stalls of {title}"),
        tag("style", Markup(style)),
    )
    usual = found.usual
    parts = [
        (what, seconds_text(seconds), f"{seconds / usual.step_s:.0%}")
        for what, seconds in usual.parts
    ]
    drawn = _drawn(seen[USUAL].steps)
    changes = [(name, seconds_text(step_s), words) for name, step_s, words in gains(found)]
    media = [
        (name, _workers(workers), seconds_text(step_s))
        for name, workers, step_s in found.advice.media
    ]
    body = [
        tag("header", tag("h1", f"Stalls of {title}"), tag("p", _set_up(found), class_="quiet")),
        tag("h2", f"Of a step of {seconds_text(usual.step_s)}"),
        _table(parts),
        tag("p", _difference(found), class_="quiet"),
        *([tag("p", _warning(found))] if found.doubt else []),
        tag("h2", _limit(found)),
        tag("p", _why(found)),
        tag("h2", f"Stages over {_over_steps(drawn)}"),
        picture(drawn),
        *([tag("h2", "What if"), _table(changes)] if changes else []),
        *([tag("h2", ELSEWHERE), _table(media), tag("p", cheaper(found))]
          if media else []),
        tag("h2", RECOMMENDED),
        tag("ul", *(tag("li", setting) for setting in found.advice.settings)),
    ]  # fmt: skip
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", tag("main", *body))}</html>\n'


def _table(rows: Sequence[Sequence[str]]) -> Markup:
    return tag(
        "table",
        *(
            tag("tr", tag("td", row[0]), *(tag("td", cell, class_="number") for cell in row[1:]))
            for row in rows
        ),
    )

"""Lanes: a timeline of the stages of a feed over some steps, the loop on top, workers below.

    step      1            2
    loop      ░░░██████████░░░██████████
    worker 0  ▒▒▒▒▒▒▒▒━━━━━━▒▒▒▒▒▒▒▒━━━━

A worker fetches and prepares the samples of a batch in turns. It is drawn as if it had done one
after the other, which is what counts for the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.records.stage import (
    COLLATE,
    COPY,
    DELIVER,
    FETCH,
    INLINE,
    PREPARE,
    WAIT,
    StageSpan,
)
from terrazzo.records.units import seconds_text
from terrazzo.report.svg import Markup, percent, tag

COMPUTE = "compute"
MARKS = {COMPUTE: "█", WAIT: "░", COPY: "┼", DELIVER: "┬", FETCH: "▒", PREPARE: "━", COLLATE: "─"}
CLASSES = {
    COMPUTE: "compute", WAIT: "waiting", COPY: "agree", DELIVER: "exchange",
    FETCH: "feed", PREPARE: "sum", COLLATE: "one",
}  # fmt: skip
WORDS = {
    COMPUTE: "compute", WAIT: "waiting for a batch", COPY: "copying", DELIVER: "sending",
    FETCH: "fetch", PREPARE: "pre-process", COLLATE: "collate",
}  # fmt: skip
ROW_PX, GAP_PX, AXIS_PX = 22, 6, 18
STEP = "step"


@dataclass(frozen=True, slots=True)
class Piece:
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some steps, and what everybody did in them."""

    lanes: tuple[Lane, ...]
    steps: tuple[tuple[int, float], ...]
    """Their numbers, and when they begin."""
    end_s: float

    @property
    def begin_s(self) -> float:
        return self.steps[0][1]

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def kinds(self) -> list[str]:
        """What occurs, in the order of the legend."""
        seen = {piece.kind for lane in self.lanes for piece in lane.pieces}
        return [kind for kind in WORDS if kind in seen]


def timeline(
    spans: Sequence[StageSpan], *, steps: Sequence[tuple[int, float]], end_s: float
) -> Timeline:
    """Of ``steps``, by number and beginning; ``spans`` may lie outside of them."""
    return Timeline(tuple(lanes(spans, steps[0][1], end_s)), tuple(steps), end_s)


def lanes(spans: Sequence[StageSpan], begin_s: float, end_s: float) -> list[Lane]:
    """The loop, and everybody who makes batches, from ``begin_s`` to ``end_s``."""
    seen = [s for s in spans if s.end_s > begin_s and s.begin_s < end_s]
    inside = [s for s in seen if not s.is_beside]
    own = sorted((Piece(s.stage, s.begin_s, s.end_s) for s in inside), key=lambda p: p.begin_s)
    pieces: list[Piece] = []
    at_s = begin_s
    for piece in own:
        if piece.begin_s > at_s:
            pieces.append(Piece(COMPUTE, at_s, piece.begin_s))
        pieces.append(piece)
        at_s = max(at_s, piece.end_s)
    pieces.append(Piece(COMPUTE, at_s, end_s))
    found = [Lane("loop", tuple(_within(pieces, begin_s, end_s)))]
    for worker in sorted({s.worker for s in seen if s.is_beside}):
        name = "in the loop" if worker == INLINE else f"worker {worker}"
        mine = _made([s for s in seen if s.is_beside and s.worker == worker])
        found.append(Lane(name, tuple(_within(mine, begin_s, end_s))))
    return found


def _made(spans: Sequence[StageSpan]) -> list[Piece]:
    """The stages of every batch, one after the other from where the batch began."""
    batches: dict[tuple[int, int], list[StageSpan]] = {}
    for span in spans:
        batches.setdefault((span.epoch, span.batch), []).append(span)
    pieces = []
    for stages in batches.values():
        at_s = min(span.begin_s for span in stages)
        for kind in (FETCH, PREPARE, COLLATE):
            worked_s = sum(span.worked_s for span in stages if span.stage == kind)
            pieces.append(Piece(kind, at_s, at_s + worked_s))
            at_s += worked_s
    return pieces


def _within(pieces: Sequence[Piece], begin_s: float, end_s: float) -> list[Piece]:
    cut = [Piece(p.kind, max(p.begin_s, begin_s), min(p.end_s, end_s)) for p in pieces]
    return [piece for piece in cut if piece.end_s > piece.begin_s]


def rows(drawn: Timeline, *, width: int) -> list[str]:
    """For a terminal: every column is what most of its time was."""
    wide = max(len(lane.name) for lane in drawn.lanes)
    columns = max(width - wide - 2, 10)
    each_s = drawn.length_s / columns
    found = [f"{STEP:<{wide}}  {_numbers(drawn, columns)}"]
    for lane in drawn.lanes:
        marks = "".join(_mark(lane, drawn.begin_s + n * each_s, each_s) for n in range(columns))
        found.append(f"{lane.name:<{wide}}  {marks}")
    return found


def _numbers(drawn: Timeline, columns: int) -> str:
    """Each step's where it begins, if there is room for it."""
    text = ""
    for number, begin_s in drawn.steps:
        place = int(columns * (begin_s - drawn.begin_s) / drawn.length_s)
        if (not text or place > len(text)) and place + len(str(number)) <= columns:
            text = f"{text:<{place}}{number}"
    return f"{text:<{columns}}"


def _mark(lane: Lane, begin_s: float, length_s: float) -> str:
    end_s, best, most_s = begin_s + length_s, " ", 0.5 * length_s / 4
    for piece in lane.pieces:
        overlap_s = min(piece.end_s, end_s) - max(piece.begin_s, begin_s)
        if overlap_s > most_s:
            best, most_s = MARKS[piece.kind], overlap_s
    return best


def picture(drawn: Timeline) -> Markup:
    """For a page, with a legend; shapes are placed by percentages, so it stretches."""
    begin_s, length_s = drawn.begin_s, drawn.length_s
    height = AXIS_PX + len(drawn.lanes) * (ROW_PX + GAP_PX)
    rects = [
        tag(
            "rect",
            tag("title", f"{lane.name}: {WORDS[piece.kind]}, "
                f"{seconds_text(piece.end_s - piece.begin_s)}"),
            class_=CLASSES[piece.kind],
            x=percent((piece.begin_s - begin_s) / length_s),
            y=_top(number),
            width=percent((piece.end_s - piece.begin_s) / length_s),
            height=ROW_PX,
        )
        for number, lane in enumerate(drawn.lanes)
        for piece in lane.pieces
    ]  # fmt: skip
    names = [
        tag("div", lane.name, style=f"top:{_top(number)}px;height:{ROW_PX}px")
        for number, lane in enumerate(drawn.lanes)
    ]
    places = [(number, percent((at_s - begin_s) / length_s)) for number, at_s in drawn.steps]
    axis = [tag("text", f"{STEP} {number}", x=x, y=11) for number, x in places]
    borders = [tag("line", class_="border", x1=x, x2=x, y1=0, y2=height) for _, x in places[1:]]
    keys = [
        tag("span", tag("span", class_=f"key {CLASSES[kind]}"), WORDS[kind]) for kind in drawn.kinds
    ]
    svg = tag(
        "svg", *rects, *borders, tag("g", *axis, class_="ticks"), height=height, role="img",
        aria_label="stages of the input over some steps",
    )  # fmt: skip
    return tag(
        "div",
        tag("div", *keys, class_="keys"),
        tag(
            "div",
            tag("div", *names, class_="names"),
            tag("div", svg, class_="scroll", tabindex="0"),
            class_="timeline",
        ),
    )


def _top(number: int) -> int:
    return AXIS_PX + number * (ROW_PX + GAP_PX)

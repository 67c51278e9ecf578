"""Draws the picture of the README from a recorded demo.

Run as ``draw_readme.py runs/<id of a demo> docs/tiles.svg``. Tiles and halos are those of the
demo's own network with its layers fused into a few groups; losses and memory are what the demo
measured. The scene is drawn here, so that the picture stays small and sharp.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from terrazzo.geometry import Box
from terrazzo.planner import plan_graph
from terrazzo.records import Graph
from terrazzo.records.units import bytes_text
from terrazzo.report.planview import PlanView, view
from terrazzo.report.reading import Reading
from terrazzo.report.svg import Markup, tag

WIDTH, HEIGHT = 880, 300
SIDE = 200
"""Of the picture, in units of the drawing."""
TOP = 46
GROUPS = 3

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
text { fill: #1c2024; }
.title { font-weight: 600; }
.quiet { fill: #5c656e; font-size: 12px; }
.on { fill: #fff; stroke: #000; stroke-opacity: .7; stroke-width: 3px; paint-order: stroke; }
.on { font-weight: 600; }
.line { stroke: #c9ced3; fill: none; }
.one { stroke: #d3a8c6; stroke-width: 7; } .many { stroke: #8a2c6d; stroke-width: 2; }
.curve { fill: none; stroke-linejoin: round; stroke-linecap: round; }
rect.one { fill: #d3a8c6; stroke: none; } rect.many { fill: #8a2c6d; stroke: none; }
.arrow { stroke: #8b949c; stroke-width: 2; fill: none; stroke-linecap: round; }
.tile { fill: none; stroke: #fff; stroke-width: 2; }
.halo { fill: none; stroke: #5c656e; stroke-width: 1.4; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaec; }
  .quiet { fill: #a0a9b2; }
  .line { stroke: #454d55; }
  .one { stroke: #7a4f6c; } .many { stroke: #f09ad4; }
  rect.one { fill: #7a4f6c; } rect.many { fill: #f09ad4; }
  .halo { stroke: #a0a9b2; }
  text.on { fill: #fff; }
}
"""


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    reading = Reading.open(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(drawing(reading) + "\n", encoding="utf-8")
    return 0


def drawing(reading: Reading) -> str:
    assert reading.graph is not None and reading.alone is not None, "not a finished demo"
    plan = plan_graph(reading.graph, reading.devices, layout="tiles:2x2", groups=GROUPS)
    seen = view(reading.graph, plan)
    assert seen is not None, "the plan is not one of this graph"
    words = (
        f"A picture cut into {seen.devices} tiles; each device reads its tile and a halo around "
        "it. The loss curves of all devices together and of one device alone lie on each other, "
        "and each device needs less memory than one alone."
    )
    return tag(
        "svg",
        tag("title", words),
        tag("style", Markup(STYLE)),
        tag("defs", scene(), *clips(seen)),
        picture(seen),
        arrow(232, 252),
        devices(seen, fused=convolutions(reading.graph, plan.groups[0].last)),
        arrow(536, 556),
        losses(reading),
        memory(reading),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        role="img",
    )


# ---- the picture and its tiles --------------------------------------------------------------


def scene() -> Markup:
    """Things to detect, some of them on borders of tiles."""
    sky = tag(
        "linearGradient",
        tag("stop", offset=0, stop_color="#8fc7c9"),
        tag("stop", offset=1, stop_color="#3f8391"),
        id="sky", x2=1, y2=1,
    )  # fmt: skip
    return tag(
        "g",
        sky,
        tag("rect", width=SIDE, height=SIDE, fill="url(#sky)"),
        tag("circle", cx=102, cy=88, r=31, fill="#f4b942"),
        tag("path", d="M24 176 L62 102 L98 176 Z", fill="#d65f4c"),
        tag("rect", x=142, y=118, width=44, height=60, rx=3, fill="#5b4b8a"),
        tag("circle", cx=40, cy=52, r=16, fill="#f3eee3"),
        tag("path", d="M138 28 L182 44 L150 70 Z", fill="#2f5d50"),
        id="scene",
    )


def clips(seen: PlanView) -> list[Markup]:
    whole = tag("clipPath", tag("rect", width=SIDE, height=SIDE), id="whole")
    return [
        whole,
        *(
            tag("clipPath", tag("rect", **area(box, seen)), id=f"{name}{device}")
            for name, boxes in (("tile", seen.tiles), ("halo", seen.needed))
            for device, box in enumerate(boxes)
        ),
    ]


def area(box: Box, seen: PlanView) -> dict[str, float]:
    """A box of the input as a rectangle of the drawing."""
    (top, bottom), (left, right) = box.spans[-2:]
    x, y = SIDE / seen.width, SIDE / seen.height
    return {
        "x": left * x, "y": top * y, "width": (right - left) * x, "height": (bottom - top) * y
    }  # fmt: skip


def picture(seen: PlanView) -> Markup:
    lines = [tag("rect", **area(box, seen), class_="tile") for box in seen.tiles]
    cut = tag("g", *lines, clip_path="url(#whole)")
    whole = tag("g", tag("use", href="#scene"), cut, transform=f"translate(12 {TOP})")
    return tag(
        "g",
        label("one batch of large pictures", 12, 24, "title"),
        whole,
        label(f"{seen.devices} tiles of the input, and", 12, TOP + SIDE + 24),
        label("of every feature map", 12, TOP + SIDE + 41),
    )


def convolutions(graph: Graph, last: str) -> int:
    """How many there are up to a value."""
    return sum("conv" in node.op for node in graph.nodes[: graph.producer[last] + 1])


def devices(seen: PlanView, *, fused: int) -> Markup:
    gap = 30
    parts = []
    for device, (tile, need) in enumerate(zip(seen.tiles, seen.needed, strict=True)):
        row, column = (tile.spans[-2][0] > 0), (tile.spans[-1][0] > 0)
        own = area(tile, seen)
        parts.append(
            tag(
                "g",
                tag("use", href="#scene", clip_path=f"url(#halo{device})", opacity=0.5),
                tag("use", href="#scene", clip_path=f"url(#tile{device})"),
                tag("rect", **area(need, seen), class_="halo"),
                label(f"device {device}", own["x"] + 8, own["y"] + (92 if row else 20), "on"),
                transform=f"translate({276 + gap * column} {TOP - 12 + gap * row})",
            )
        )
    halo = seen.halo(0)
    return tag(
        "g",
        label("each device computes its tile", 276, 24, "title"),
        *parts,
        label("and also reads a halo (dashed):", 276, TOP + SIDE + 36),
        label(f"{halo} pixels for {fused} convolutions in a row", 276, TOP + SIDE + 52),
    )


def arrow(left: int, right: int) -> Markup:
    y = TOP + SIDE // 2
    return tag("path", d=f"M{left} {y} H{right} m-6 -6 l6 6 l-6 6", class_="arrow")


def label(text: str, x: float, y: float, kind: str = "quiet") -> Markup:
    return tag("text", text, x=x, y=y, class_=kind)


# ---- what the demo measured -----------------------------------------------------------------

CHART = 580
"""Where the charts begin, from the left."""


def losses(reading: Reading) -> Markup:
    assert reading.alone is not None
    height, width = 82, 288
    top, last = max(reading.losses.values()), max(reading.losses)

    def curve(values: Mapping[int, float], kind: str) -> Markup:
        points = " ".join(
            f"{CHART + width * (step - 1) / (last - 1):.1f},{TOP + height * (1 - loss / top):.1f}"
            for step, loss in values.items()
        )
        return tag("polyline", points=points, class_=f"curve {kind}")

    gap = max(reading.loss_gaps.values())
    axes = f"M{CHART - 6} {TOP} V{TOP + height + 4} H{CHART + width}"
    return tag(
        "g",
        label("the same training", CHART, 24, "title"),
        tag("path", d=axes, class_="line"),
        curve(reading.alone.losses, "one"),
        curve(reading.losses, "many"),
        label(f"loss of {reading.devices} devices on that of one:", CHART + 78, TOP + 14),
        label(f"at most {gap:.0e} apart in {last} steps", CHART + 78, TOP + 31),
    )


def memory(reading: Reading) -> Markup:
    assert reading.alone is not None
    rows = [("one alone", "one", reading.alone.memory[0].own_bytes)]
    rows += [(f"device {m.device}", "many", m.own_bytes) for m in reading.memory]
    most = max(size for _, _, size in rows)
    top, left, width = TOP + 130, CHART + 64, 156
    parts = [label("in less memory", CHART, top - 14, "title")]
    for place, (name, kind, size) in enumerate(rows):
        y, long = top + place * 18, width * size / most
        parts += [
            label(name, CHART, y + 11),
            tag("rect", x=left, y=y, width=long, height=12, rx=2, class_=kind),
            label(bytes_text(size), left + long + 7, y + 11),
        ]
    note = "peak of training beyond the idle process"
    return tag("g", *parts, label(note, CHART, top + len(rows) * 18 + 16))


if __name__ == "__main__":
    sys.exit(main())

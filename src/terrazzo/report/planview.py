"""A plan as people look at it: tiles over the input, and one row per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.errors import TerrazzoError
from terrazzo.geometry import Box, grid
from terrazzo.records import Graph, Plan
from terrazzo.schedule import Exchange, Program, lower
from terrazzo.schedule.tiling import owned, placements
from terrazzo.schedule.traffic import moved_bytes

AXES = ("images", "channels", "rows", "columns")
SHORT = 16


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: its layers, the map it makes, and what it asks of other devices."""

    number: int
    title: str
    layout: str
    map_shape: tuple[int, ...]
    forward_bytes: int
    """Sent by all devices together, before the group's forward pass."""
    cut: str = ""
    """What of the map each device makes: ``rows 35 35 34``, ``channels 86 85 85``."""
    boxes: tuple[Box, ...] = ()
    """The same as boxes, one for each device; none where each makes all of it."""

    @property
    def map_text(self) -> str:
        """``16 x 64x64`` for channels, height, width."""
        if len(self.map_shape) == 4:
            return f"{self.map_shape[1]} x {self.map_shape[2]}x{self.map_shape[3]}"
        return "x".join(map(str, self.map_shape)) or "one number"


@dataclass(frozen=True, slots=True)
class PlanView:
    """The largest image input with what each device owns and needs of it; all groups."""

    devices: int
    input_shape: tuple[int, ...]
    tiles: tuple[Box, ...]
    needed: tuple[Box, ...]
    groups: tuple[GroupRow, ...]

    @property
    def is_tiled(self) -> bool:
        """Whether the input itself is cut into tiles that can be drawn over it."""
        return len({tile.spans[-2:] for tile in self.tiles}) == len(set(self.tiles)) > 1

    @property
    def height(self) -> int:
        return self.input_shape[-2]

    @property
    def width(self) -> int:
        return self.input_shape[-1]

    def halo(self, device: int) -> int:
        """How many rows and columns beyond its tile a device reads, at most."""
        tile, need = self.tiles[device], self.needed[device]
        if tile.is_empty:
            return 0
        return max(
            max(own[0] - all_[0], all_[1] - own[1])
            for own, all_ in zip(tile.spans[-2:], need.spans[-2:], strict=True)
        )


def view(graph: Graph | None, plan: Plan | None) -> PlanView | None:
    """None without a plan, without an image input, or when they do not belong together."""
    if graph is None or plan is None:
        return None
    images = [name for name in graph.inputs if name and len(graph.shape(name)) == 4]
    if not images:
        return None
    name = max(images, key=lambda image: graph.shape(image)[-1] * graph.shape(image)[-2])
    try:
        program = lower(graph, plan)
    except (TerrazzoError, KeyError):
        return None
    whole = (Box.whole(graph.shape(name)),) * plan.devices
    cuts = [("nchw".index(axis), shares) for axis, shares in plan.groups[0].layout.cuts]
    tiles = grid(graph.shape(name), cuts) if cuts else whole
    return PlanView(
        devices=plan.devices,
        input_shape=graph.shape(name),
        tiles=tiles,
        needed=program.given.get(name, whole),
        groups=_groups(graph, plan, program),
    )


def _groups(graph: Graph, plan: Plan, program: Program) -> tuple[GroupRow, ...]:
    sent = [0] * len(plan.groups)
    for step in program.steps:
        if isinstance(step, Exchange):
            for move in step.moves:
                sent[step.group] += sum(moved_bytes(program, move, back=False))
    titles = [shortened(group.title or group.last) for group in plan.groups]
    _, letters = placements(graph, plan)
    rows = []
    for number, (group, title, amount) in enumerate(zip(plan.groups, titles, sent, strict=True)):
        shape, axes = graph.shape(group.last), letters[group.layout.letters][group.last]
        boxes = () if group.layout.is_whole else owned(shape, axes, group.layout)
        rows.append(
            GroupRow(number, title, str(group.layout), shape, amount, cut_text(boxes), tuple(boxes))
        )
    return tuple(rows)


def cut_text(boxes: Sequence[Box]) -> str:
    """How boxes divide a map, dimension by dimension; nothing where each is all of it."""
    words = []
    for dim in range(boxes[0].rank if boxes else 0):
        spans = sorted({box.spans[dim] for box in boxes if not box.is_empty})
        sizes = [high - low for low, high in spans]
        if len(sizes) > 1:
            name = AXES[dim] if boxes[0].rank == len(AXES) else f"dimension {dim}"
            even = len(set(sizes)) == 1
            words.append(f"{name} " + (f"{sizes[0]} each" if even else " ".join(map(str, sizes))))
    return ", ".join(words)


def shortened(title: str) -> str:
    """``backbone.fine.3.0..backbone.fine.4`` as ``backbone.fine.3.0..4``; short ones stay."""
    first, dots, last = title.partition("..")
    own, others = last.split("."), first.split(".")
    same = 0
    while same < min(len(own), len(others)) - 1 and own[same] == others[same]:
        same += 1
    return title if len(title) <= SHORT else f"{first}{dots}{'.'.join(own[same:])}"

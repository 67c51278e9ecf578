"""Where weights live: whole on every device, or cut, each part only with those that use it.

A parameter is cut when devices use parts of it, each the same part in all its uses, and any two
devices' parts are equal or apart: then gradient and optimiser state live there too, and only
devices with equal parts sum their gradients. Any other parameter is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from terrazzo.geometry import Box
from terrazzo.graph.rules import WHOLE
from terrazzo.schedule.tiling import Boxes, Tiling

Homes = Mapping[str, Boxes]
"""The boxes of cut parameters, by name of the value."""


def homes(tiling: Tiling) -> dict[str, Boxes]:
    """The parameters that a tiling cuts."""
    found: dict[str, Boxes | None] = {}
    for index, node in enumerate(tiling.graph.nodes):
        for position, name in enumerate(node.refs):
            value = tiling.graph.values[name]
            if value.kind != "parameter":
                continue
            whole = (Box.whole(value.shape),) * tiling.plan.devices
            used = whole
            if tiling.placed[index].role != WHOLE:
                used = tuple(
                    local.reads[position].box if local else Box.empty(len(value.shape))
                    for local in tiling.locals[index]
                )
            same = found.get(name, used) == used
            parts = any(not box.is_empty and box != whole[0] for box in used)
            found[name] = used if same and parts and _apart(used) else None
    return {name: boxes for name, boxes in found.items() if boxes and _covers(boxes, name, tiling)}


def _apart(boxes: Boxes) -> bool:
    """Whether every two boxes are equal or do not meet."""
    return all(
        one == other or one.intersect(other).is_empty for one, other in combinations(boxes, 2)
    )


def _covers(boxes: Boxes, name: str, tiling: Tiling) -> bool:
    whole = Box.whole(tiling.graph.shape(name))
    return sum(box.size for box in set(boxes) if not box.is_empty) == whole.size


def owners(boxes: Boxes) -> Boxes:
    """A disjoint cover: of devices with equal boxes, the first."""
    return tuple(
        box if box not in boxes[:device] else Box.empty(box.rank)
        for device, box in enumerate(boxes)
    )


def sharers(boxes: Boxes) -> tuple[tuple[int, ...], ...]:
    """For each device, those that hold the same box, itself included."""
    return tuple(
        tuple(other for other, box in enumerate(boxes) if box == mine) if not mine.is_empty else ()
        for mine in boxes
    )

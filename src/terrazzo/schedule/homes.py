"""Where weights live: whole on every device, or cut, each part only with those that use it.

A parameter is cut when devices use parts of it, each the same part in all its uses, and any two
devices' parts are equal or apart: then gradient and optimiser state live there too, and only
devices with equal parts sum their gradients. Any other parameter is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod

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
            found[name] = used if same and is_cut(used, value.shape) else None
    return {name: boxes for name, boxes in found.items() if boxes}


def is_cut(boxes: Boxes, shape: Sequence[int]) -> bool:
    """Whether boxes are parts of a weight: equal or apart, and together all of it."""
    distinct = {box for box in boxes if not box.is_empty}
    if distinct <= {Box.whole(shape)}:
        return False  # a device without work keeps its weights
    apart = all(one.intersect(other).is_empty for one, other in combinations(distinct, 2))
    return apart and sum(box.size for box in distinct) == prod(shape)


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

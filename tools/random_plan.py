"""A plan drawn at random, for tools that hold many against each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

from terrazzo.planner.borders import ends
from terrazzo.planner.explicit import group_title
from terrazzo.records import Graph, Group, Layout, Plan


def random_plan(
    graph: Graph,
    layouts: Sequence[Layout],
    draw: random.Random,
    *,
    devices: int,
    borders: tuple[int, int],
    passes: Sequence[int] = (0,),
) -> Plan:
    """Groups in any of these layouts. ``borders``: how many there are, at least and at most;
    ``passes``: what a group may have, as often as it stands there."""
    places = ends(graph)
    least, most = borders
    count = draw.randint(least, min(most, len(places) - 1))
    groups, begin = [], 0
    for end in [*sorted(draw.sample(places[:-1], count)), places[-1]]:
        title, strips = group_title(graph, begin, end), draw.choice(passes)
        groups.append(Group(graph.nodes[end].output, draw.choice(layouts), title, strips))
        begin = end + 1
    return Plan(graph.digest, devices, tuple(groups))

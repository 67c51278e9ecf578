"""A plan from explicit choices: one layout for all, and where groups end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.pooling import end_of
from terrazzo.graph.rules.windows import windowed
from terrazzo.planner.borders import behind_statistics, heads
from terrazzo.records import Graph, Group, Layout, Plan
from terrazzo.schedule.tiling import group_of_nodes

Groups = str | int | Sequence[str]


def plan_graph(
    graph: Graph, devices: int, *, layout: str | Layout, groups: Groups, passes: int = 0
) -> Plan:
    """A plan for one graph.

    ``layout``: "auto", "whole", "tiles", "tiles:RxC" or a Layout. ``groups``: "auto" (one
    for every operator that needs halos), "each" (for every product too), "one", a number, or names
    of layers that end groups.
    """
    if devices < 1:
        raise UsageError(f"a plan for {devices} devices was asked for; it needs at least 1")
    if not graph.nodes:
        raise PlanError("the model has no operators: there is nothing to plan")
    chosen = layout_of(graph, devices, layout)
    whole = Plan(graph.digest, devices, (Group(graph.nodes[-1].output, chosen),))
    return with_borders(graph, whole, _ends(graph, groups, behind=passes > 0), passes)


def regrouped(graph: Graph, plan: Plan, groups: Groups) -> Plan:
    """The layouts of a plan with other borders; groups also end where its layout changes."""
    layouts = [plan.groups[place].layout for place in group_of_nodes(graph, plan)]
    changes = [at for at, both in enumerate(pairwise(layouts)) if both[0] != both[1]]
    return with_borders(graph, plan, [*_ends(graph, groups, behind=False), *changes])


def with_borders(graph: Graph, plan: Plan, ends: Iterable[int], passes: int = 0) -> Plan:
    """A plan with groups that end behind these nodes, in the layouts it had there; with passes,
    behind the statistics there too: those of the next group would keep what they are taken of."""
    places = group_of_nodes(graph, plan)
    ends = {*ends, len(graph.nodes) - 1}
    groups, first = [], 0
    for last in sorted({behind_statistics(graph, end) for end in ends} if passes else ends):
        layout, title = plan.groups[places[last]].layout, group_title(graph, first, last)
        groups.append(Group(graph.nodes[last].output, layout, title, passes))
        first = last + 1
    return replace(plan, groups=tuple(groups))


def layout_of(graph: Graph, devices: int, layout: str | Layout) -> Layout:
    """The layout that was asked for by name."""
    if layout in ("samples", "channels"):
        layout = f"{layout}:{devices}"
    if isinstance(layout, str):
        open_ = layout in ("auto", "tiles")
        layout = best_grid(graph, devices) if open_ else Layout.parse(layout)
    if not layout.is_whole and layout.devices != devices:
        raise PlanError(
            f"layout {layout} is for {layout.devices} devices, this cluster has {devices}: "
            f'take layout="{best_grid(graph, devices)}"'
        )
    return layout


def best_grid(graph: Graph, devices: int) -> Layout:
    """The grid whose inner borders are shortest on the largest image input."""
    images = [graph.shape(name) for name in graph.inputs if name and len(graph.shape(name)) == 4]
    if devices == 1 or not images:
        return Layout() if not images else Layout.tiles(1, 1)
    height, width = max(images, key=lambda shape: shape[-1] * shape[-2])[-2:]
    grids = [(rows, devices // rows) for rows in range(1, devices + 1) if devices % rows == 0]
    rows, cols = min(grids, key=lambda g: ((g[0] - 1) * width + (g[1] - 1) * height, g[1]))
    return Layout.tiles(rows, cols)


def _ends(graph: Graph, groups: Groups, *, behind: bool) -> list[int]:
    """The indices of the nodes that end groups."""
    final = len(graph.nodes) - 1
    if groups == "one":
        return [final]
    if groups == "each":
        products = heads(graph)
        return _even_ends(graph, products, len(products) or 1, behind=behind)
    # The operators that need halos: products of single pixels go with them, so that in channels a
    # pair of convolutions exchanges once.
    windows = [index for index, node in enumerate(graph.nodes) if windowed(node, graph)]
    if groups == "auto":
        return _even_ends(graph, windows, len(windows) or 1, behind=behind)
    if isinstance(groups, str) and groups.isdigit():
        groups = int(groups)
    if isinstance(groups, int):
        return _even_ends(graph, windows, groups, behind=behind)
    names = groups.split(",") if isinstance(groups, str) else list(groups)
    ends = {_layer_end(graph, name) for name in names}
    return sorted(ends | {final})


def _even_ends(graph: Graph, begins: Sequence[int], count: int, *, behind: bool) -> list[int]:
    """Groups with equal numbers of the operators that one may begin with.

    A group ends just before the next such operator, or right behind its own last one: then what
    is kept between groups are results of convolutions, from which the cheap rest is made again.
    """
    if not 1 <= count <= max(len(begins), 1):
        raise PlanError(
            f"groups={count}: the model has {len(begins)} operators with windows, so a number from "
            f"1 to {max(len(begins), 1)} makes sense"
        )
    cuts = [position * len(begins) // count for position in range(1, count)]
    ends = [begins[cut - 1] if behind else begins[cut] - 1 for cut in cuts]
    return [*ends, len(graph.nodes) - 1]


def _layer_end(graph: Graph, name: str) -> int:
    found = [
        index if name == node.output else end_of(graph, index)
        for index, node in enumerate(graph.nodes)
        if name in (node.layer, node.output) or node.layer.startswith(name + ".")
    ]
    if not found:
        layers = list(dict.fromkeys(node.layer for node in graph.nodes if node.layer))
        some = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise PlanError(f"groups: the model has no layer {name!r}; it has {some}")
    return max(found)


def group_title(graph: Graph, first: int, last: int) -> str:
    one, other = (graph.nodes[i].layer or graph.nodes[i].output for i in (first, last))
    return one if first == last else f"{one}..{other}"
